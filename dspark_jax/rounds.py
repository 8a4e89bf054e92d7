"""What a round does: draft, choose what is verified, verify, commit. Pure functions, no jit."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from dspark_jax.choice import choose
from dspark_jax.config import ModelConfig
from dspark_jax.controls import count_generated
from dspark_jax.drafters import NONE, drafter_of, taps_of
from dspark_jax.layers import bind
from dspark_jax.packing import WHOLE, Packing, Whole, pack_rows
from dspark_jax.schedule import (
    after_drafting,
    choose_tier,
    confidences,
    fill_tier,
    pays,
    survival,
)
from dspark_jax.state import ContextRows, DecodeState, KVCache, Params, Proposal, StepOutput
from dspark_jax.target import Target
from dspark_jax.tiers import BatchCosts, costs_of
from dspark_jax.verify import verify

Verified = tuple[KVCache, tuple[ContextRows, StepOutput]]


def bind_target(config: ModelConfig, params: Params) -> Target:
    return bind(Target, config.target, config.dtype, params["target"])


def run_round(
    config: ModelConfig, params: Params, state: DecodeState
) -> tuple[DecodeState, StepOutput]:
    """Draft, verify, accept, commit; where verification is scheduled, draft only where it pays."""
    if not config.decode.costs:
        state, proposal = propose(config, params, state)
        return verify_proposal(config, params, state, proposal)
    paid = pays(state.gains, ~state.done)
    drafting = paid | (state.gains.idle >= state.gains.wait)
    plain, drafted = (
        partial(plain_round, config, params),
        partial(drafted_round, config, params, paid),
    )
    return choose(drafting, (plain, drafted), state)


def batch_costs(config: ModelConfig, state: DecodeState) -> BatchCosts:
    return costs_of(config.decode.costs, state.cached.shape[0], config.decode.sampled)


def drafted_round(
    config: ModelConfig, params: Params, paid: Bool[Array, ""], state: DecodeState
) -> tuple[DecodeState, StepOutput]:
    active, costs = ~state.done, batch_costs(config, state)
    state, proposal = propose(config, params, state)
    proposal, tier = schedule(config, state, proposal)
    state, output = verify_tier(config, params, state, proposal, tier)
    price = jnp.asarray(costs.rounds, jnp.float32)[tier] / costs.plain
    gains = after_drafting(state.gains, output.counts[:, 0], active, price, paid)
    return replace(state, gains=gains), output


def plain_round(
    config: ModelConfig, params: Params, state: DecodeState
) -> tuple[DecodeState, StepOutput]:
    """The anchors alone, one row each, which wait as context until a block of them is full."""
    state = make_room(config, params, state)
    _, nothing = NONE.propose(config, params, state)
    cache, (rows, output) = _verify_rows(config, params, WHOLE, state, nothing)
    missing = config.decode.num_drafts

    def widen(x: Array) -> Array:
        return jnp.pad(x, ((0, 0), (0, missing), *[(0, 0)] * (x.ndim - 2)))

    output = replace(
        output,
        tokens=widen(output.tokens),
        logprobs=jax.tree.map(widen, output.logprobs),
        possible=widen(output.possible) if config.decode.ceiling else output.possible,
    )
    state, output = _commit(config, state, (cache, (rows, output)))
    return replace(state, gains=replace(state.gains, idle=state.gains.idle + 1)), output


def make_room(config: ModelConfig, params: Params, state: DecodeState) -> DecodeState:
    """Absorb where a running row has no place for one more row of context.

    To read the weights of the context path in every plain round would be the price of resting.
    """
    full = (state.context_len >= config.decode.step_rows) & ~state.done

    waiting = state.draft, state.context_len

    def kept(waiting: tuple[Any, Array]) -> tuple[tuple[Any, Array], tuple[()]]:
        return waiting, ()

    def absorbed(waiting: tuple[Any, Array]) -> tuple[tuple[Any, Array], tuple[()]]:
        own, context_len = waiting
        after = absorb(config, params, replace(state, draft=own, context_len=context_len))
        return (after.draft, after.context_len), ()

    (own, context_len), _ = choose(jnp.any(full), (kept, absorbed), waiting)
    return replace(state, draft=own, context_len=context_len)


def absorb(config: ModelConfig, params: Params, state: DecodeState) -> DecodeState:
    """Take the rows that wait into the drafter's own state."""
    begin = state.cached - state.context_len
    own = drafter_of(config).absorb(
        config, params, state.draft, state.context, begin, state.context_len
    )
    return replace(state, draft=own, context_len=jnp.zeros_like(state.context_len))


def propose(
    config: ModelConfig, params: Params, state: DecodeState
) -> tuple[DecodeState, Proposal]:
    with jax.named_scope("dspark_propose"):
        state = absorb(config, params, state)
        own, proposal = drafter_of(config).propose(config, params, state)
    return replace(state, draft=own), proposal


def verify_proposal(
    config: ModelConfig, params: Params, state: DecodeState, proposal: Proposal
) -> tuple[DecodeState, StepOutput]:
    """Verify all of a proposal, or what the schedule chooses of it."""
    if not config.decode.costs:
        return _commit(config, state, _verify_rows(config, params, WHOLE, state, proposal))
    proposal, tier = schedule(config, state, proposal)
    return verify_tier(config, params, state, proposal, tier)


def schedule(
    config: ModelConfig, state: DecodeState, proposal: Proposal
) -> tuple[Proposal, Int[Array, ""]]:
    """Cut each row's proposal to what is worth its cost; returns the tier that holds the batch."""
    costs, active = batch_costs(config, state), ~state.done
    with jax.named_scope("schedule"):
        alive = survival(confidences(proposal.confidence, config.decode.temperatures))
        curve = jnp.asarray(costs.envelope(), jnp.float32)
        tier = choose_tier(alive, active, curve, costs.tokens)
        lengths = fill_tier(alive, active, jnp.asarray(costs.tokens, jnp.int32)[tier])
    return replace(proposal, length=lengths), tier


def verify_tier(
    config: ModelConfig,
    params: Params,
    state: DecodeState,
    proposal: Proposal,
    tier: Int[Array, ""],
) -> tuple[DecodeState, StepOutput]:
    """Run the target on the chosen tokens, packed into the tier's size."""
    slots = jnp.arange(config.decode.step_rows)
    chosen = (slots <= proposal.length[:, None]) & ~state.done[:, None]

    def run(size: int, cache: KVCache) -> Verified:
        packing = WHOLE if size == chosen.size else pack_rows(chosen, size)
        return _verify_rows(config, params, packing, replace(state, target=cache), proposal)

    branches = [partial(run, size) for size in batch_costs(config, state).tokens]
    return _commit(config, state, choose(tier, branches, state.target))


def _verify_rows(
    config: ModelConfig,
    params: Params,
    packing: Packing | Whole,
    state: DecodeState,
    proposal: Proposal,
) -> Verified:
    target = bind_target(config, params)
    with jax.named_scope("target_verify"):
        tokens = jnp.concatenate([state.anchor[:, None], proposal.tokens], axis=1)
        hidden, tapped, cache = target(
            tokens,
            state.target,
            state.cached,
            taps_of(config),
            config.decode.implementation,
            packing,
        )
        logits = packing.unpack(target.logits(hidden))
    with jax.named_scope("decode_sample"):
        output = verify(logits, proposal, state, config.decode)
    return cache, (ContextRows(tokens=tokens, features=packing.unpack(tapped)), output)


def _commit(
    config: ModelConfig, state: DecodeState, verified: Verified
) -> tuple[DecodeState, StepOutput]:
    cache, (rows, output) = verified
    with jax.named_scope("decode_sample"):
        state = commit(replace(state, target=cache), output, rows)
        if config.decode.controls:
            counted = count_generated(state.controls, output.tokens, output.counts[:, 0])
            state = replace(state, controls=counted)
    return state, output


def commit(state: DecodeState, output: StepOutput, rows: ContextRows) -> DecodeState:
    """Advance `cached`, not past the limit; a row that was finished before stays as it was."""

    def kept(old: Array, new: Array) -> Array:
        return jnp.where(finished.reshape(-1, *[1] * (new.ndim - 1)), old, new)

    emitted, finished = output.counts[:, 0], state.done
    advance = jnp.minimum(emitted, state.limit - state.cached)
    places = jnp.maximum(emitted - 1, 0)[:, None]
    anchor = jnp.take_along_axis(output.tokens, places, axis=1)[:, 0]
    # Cut like `cached`: the next draft writes the context at their difference.
    context, context_len = _join(state, rows, advance)
    return replace(
        state,
        cached=kept(state.cached, state.cached + advance),
        anchor=kept(state.anchor, anchor),
        done=output.counts[:, 3] > 0,
        context=jax.tree.map(kept, state.context, context),
        context_len=kept(state.context_len, context_len),
    )


def _join(
    state: DecodeState, rows: ContextRows, advance: Int[Array, " B"]
) -> tuple[ContextRows, Int[Array, " B"]]:
    """Context that waits after a pass: all there is room for, or a row behind the others."""
    batch, width = rows.tokens.shape
    if width == state.context.tokens.shape[1]:
        return rows, advance  # none waited: a whole pass follows a draft, which absorbs
    places = jnp.arange(batch)[:, None], state.context_len[:, None] + jnp.arange(width)
    joined = jax.tree.map(
        lambda old, new: old.at[places].set(new, mode="drop"), state.context, rows
    )
    return joined, state.context_len + advance
