"""What a round does: draft, choose what is verified, verify, commit. Pure functions, no jit."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

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
    due,
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
    drafted = partial(drafted_round, config, params)
    if not config.decode.costs:
        return drafted(state)
    drafting = due(state.gains, ~state.done)
    return choose(drafting, (partial(plain_round, config, params), drafted), state)


def batch_costs(config: ModelConfig, state: DecodeState) -> BatchCosts:
    return costs_of(config.decode.costs, state.cached.shape[0], config.decode.sampled)


def drafted_round(
    config: ModelConfig, params: Params, state: DecodeState
) -> tuple[DecodeState, StepOutput]:
    state, proposal = propose(config, params, state)
    return verify_proposal(config, params, state, proposal)


def plain_round(
    config: ModelConfig, params: Params, state: DecodeState
) -> tuple[DecodeState, StepOutput]:
    """The anchors alone, one row each, which wait as context until a block of them is full."""
    state = make_room(config, params, state)
    _, nothing = NONE.propose(config, params, state)
    cache, (row, output) = _verify_rows(config, params, WHOLE, state, nothing)
    missing = config.decode.num_drafts

    def widen(x: Array) -> Array:
        return jnp.pad(x, ((0, 0), (0, missing), *[(0, 0)] * (x.ndim - 2)))

    output = replace(
        output,
        tokens=widen(output.tokens),
        logprobs=jax.tree.map(widen, output.logprobs),
        possible=widen(output.possible) if config.decode.ceiling else output.possible,
    )
    waiting = state.context_len
    places = jnp.arange(waiting.size), waiting
    context = jax.tree.map(
        lambda rows, x: rows.at[places].set(x[:, 0], mode="drop"), state.context, row
    )
    state, output = _commit(config, state, (cache, (context, output)), waiting)
    return replace(state, gains=replace(state.gains, idle=state.gains.idle + 1)), output


def make_room(config: ModelConfig, params: Params, state: DecodeState) -> DecodeState:
    """Absorb where a running row has no place for one more row of context.

    To read the weights of the context path in every plain round would be the price of resting.
    """
    full = (state.context_len >= config.decode.step_rows) & ~state.done

    def kept(state: DecodeState) -> tuple[DecodeState, tuple[()]]:
        return state, ()

    def absorbed(state: DecodeState) -> tuple[DecodeState, tuple[()]]:
        return absorb(config, params, state), ()

    return choose(jnp.any(full), (kept, absorbed), state)[0]


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
    """Verify all of a proposal, or what the schedule chooses of it, which it learns from.

    The state is one whose context was absorbed, as `propose` leaves it.
    """
    if not config.decode.costs:
        return _commit(config, state, _verify_rows(config, params, WHOLE, state, proposal))
    costs, active = batch_costs(config, state), ~state.done
    paid = pays(state.gains, active)
    proposal, tier = schedule(config, state, proposal)
    state, output = verify_tier(config, params, state, proposal, tier)
    price = jnp.asarray(costs.rounds, jnp.float32)[tier] / costs.plain
    gains = after_drafting(state.gains, output.counts[:, 0], active, price, paid)
    return replace(state, gains=gains), output


def schedule(
    config: ModelConfig, state: DecodeState, proposal: Proposal
) -> tuple[Proposal, Int[Array, ""]]:
    """Cut each row's proposal to what is worth its cost; returns the tier that holds the batch."""
    costs, active = batch_costs(config, state), ~state.done
    batch, drafts = proposal.tokens.shape
    if costs.tokens[0] >= batch * (drafts + 1):  # nothing to choose: the one tier holds them all
        return replace(proposal, length=jnp.where(active, drafts, 0)), jnp.int32(0)
    with jax.named_scope("schedule"):
        alive = survival(confidences(proposal.confidence, config.decode.temperatures))
        curve, rounds = (jnp.asarray(x, jnp.float32) for x in (costs.envelope(), costs.rounds))
        tier = choose_tier(alive, active, curve, costs.tokens, rounds)
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
    config: ModelConfig,
    state: DecodeState,
    verified: Verified,
    waiting: Int[Array, " B"] | int = 0,
) -> tuple[DecodeState, StepOutput]:
    cache, (context, output) = verified
    with jax.named_scope("decode_sample"):
        state = commit(replace(state, target=cache), output, context, waiting)
        if config.decode.controls:
            counted = count_generated(state.controls, output.tokens, output.counts[:, 0])
            state = replace(state, controls=counted)
    return state, output


def commit(
    state: DecodeState,
    output: StepOutput,
    context: ContextRows,
    waiting: Int[Array, " B"] | int,
) -> DecodeState:
    """Advance `cached`, not past the limit; a row that was finished before stays as it was.

    The rows of the pass stand in `context` behind those that waited already.
    """

    def kept(old: Array, new: Array) -> Array:
        return jnp.where(finished.reshape(-1, *[1] * (new.ndim - 1)), old, new)

    emitted, finished = output.counts[:, 0], state.done
    advance = jnp.minimum(emitted, state.limit - state.cached)
    places = jnp.maximum(emitted - 1, 0)[:, None]
    anchor = jnp.take_along_axis(output.tokens, places, axis=1)[:, 0]
    return replace(
        state,
        cached=kept(state.cached, state.cached + advance),
        anchor=kept(state.anchor, anchor),
        done=output.counts[:, 3] > 0,
        context=jax.tree.map(kept, state.context, context),
        # Cut like `cached`: the next draft writes the context at their difference.
        context_len=kept(state.context_len, waiting + advance),
    )
