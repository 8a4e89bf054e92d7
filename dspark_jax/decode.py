"""The jitted entry points: prefill, draft, verify, round, rounds. The only jits of a run.

All are pure functions of (params, state) with the static `ModelConfig` first; the state is donated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dspark_jax.cache import allocate, capacity, read_slot, take_slot, write_slot
from dspark_jax.config import ModelConfig
from dspark_jax.controls import adjust, admit_controls, init_controls, mark_prompt
from dspark_jax.drafters import drafter_of, taps_of
from dspark_jax.rounds import bind_target, propose, run_round, verify_proposal
from dspark_jax.sampling import draw_token, report_logprobs
from dspark_jax.schedule import admit_gains, init_gains
from dspark_jax.sharding import DATA, axis_size, constrain, settle
from dspark_jax.state import (
    MAX_ROUNDS,
    MAX_STOP_IDS,
    ContextRows,
    Controls,
    DecodeState,
    FirstToken,
    Logprobs,
    Params,
    Proposal,
    Rounds,
    RowSettings,
    Sampling,
    StepOutput,
)
from dspark_jax.verify import is_stop


def entry(function: Callable[..., Any]) -> Any:
    """A jitted entry point. On a mesh (`jax.set_mesh`) its results stay where they belong."""

    @wraps(function)
    def placed(*arguments: Any, **named: Any) -> Any:
        return settle(function(*arguments, **named))

    return jax.jit(placed, static_argnums=0, donate_argnames=("state",))


def init_state(config: ModelConfig, batch: int) -> DecodeState:
    """An empty state of `batch` slots, all finished, with caches of `cache.capacity` rows."""
    layers, width = config.target.layers, config.decode.step_rows

    def integers(fill: int, *shape: int) -> Array:
        return jnp.full((batch, *shape), fill, jnp.int32)

    return DecodeState(
        cached=integers(0),
        anchor=integers(0),
        limit=integers(0),
        done=jnp.ones((batch,), bool),
        stop_ids=integers(-1, MAX_STOP_IDS),
        sampling=Sampling(
            temperature=jnp.zeros((batch,), jnp.float32),
            top_p=jnp.ones((batch,), jnp.float32),
            top_k=integers(0),
            min_p=jnp.zeros((batch,), jnp.float32),
            seed=jnp.zeros((batch, 2), jnp.uint32),
        ),
        controls=init_controls(batch, config.target.vocab_size if config.decode.controls else 0),
        target=allocate(layers, batch, capacity(config), config.dtype),
        draft=drafter_of(config).init(config, batch),
        context=ContextRows(
            tokens=integers(0, width),
            features=jnp.zeros(
                (batch, width, len(taps_of(config)) * layers.hidden_size), config.dtype
            ),
        ),
        context_len=integers(0),
        gains=init_gains(batch) if config.decode.costs else (),
    )


@entry
def admit(
    config: ModelConfig, state: DecodeState, slot: Int[Array, ""], row: RowSettings
) -> DecodeState:
    """Give a slot to a request. The row stays finished until its last prefill chunk."""
    sampling = jax.tree.map(
        lambda all_rows, value: all_rows.at[slot].set(value),
        state.sampling,
        Sampling(row.temperature, row.top_p, row.top_k, row.min_p, row.seed),
    )
    return replace(
        state,
        cached=state.cached.at[slot].set(0),
        anchor=state.anchor.at[slot].set(0),
        limit=state.limit.at[slot].set(row.prompt_length + row.max_tokens),
        done=state.done.at[slot].set(True),
        stop_ids=state.stop_ids.at[slot].set(row.stop_ids),
        sampling=sampling,
        controls=admit_controls(state.controls, slot, row)
        if config.decode.controls
        else state.controls,
        context_len=state.context_len.at[slot].set(0),
        gains=admit_gains(state.gains, slot) if config.decode.costs else state.gains,
    )


@entry
def prefill(
    config: ModelConfig,
    params: Params,
    state: DecodeState,
    slot: Int[Array, ""],
    tokens: Int[Array, " chunk"],
    count: Int[Array, ""],
    last: Bool[Array, ""],
) -> tuple[DecodeState, FirstToken]:
    """Run one chunk of a slot's prompt, of which `count` ids are real; rows after them are garbage.

    Every prompt row enters the target cache and, as a context row, the draft cache. With `last`
    the first token is drawn and the row starts to run, unless that token is a stop.
    """
    if config.decode.implementation == "pallas":
        # The kernels take up to 16 rows; a chunk takes cuDNN or the reference.
        config = replace(config, decode=replace(config.decode, implementation="auto"))
    parts = axis_size(DATA)  # each part of the slots runs the chunk, one of them for its slot
    start, counts = (jnp.broadcast_to(x, (parts,)) for x in (state.cached[slot], count))
    chunk = jnp.broadcast_to(tokens, (parts, *tokens.shape))
    target = bind_target(config, params)
    with jax.named_scope("prefill"):
        hidden, tapped, part = target(
            chunk,
            read_slot(state.target, slot),
            start,
            taps_of(config),
            config.decode.implementation,
        )
        target_cache = write_slot(state.target, part, slot)
        rows = ContextRows(tokens=chunk, features=tapped)
        own = drafter_of(config).absorb(
            config, params, read_slot(state.draft, slot), rows, start, counts
        )
        hidden = jax.lax.dynamic_slice_in_dim(hidden, count - 1, 1, axis=1)
        logits = target.logits(take_slot(hidden, slot, state.cached.shape[0]))
        logits = constrain(constrain(logits, "- T V"), "- T -")
    cached = state.cached[slot] + count
    first, controls = _draw_first(config, logits, state, slot, tokens, count)
    stopped = is_stop(first[None, None], state.stop_ids[slot][None])[0, 0]
    state = replace(
        state,
        cached=state.cached.at[slot].set(cached),
        anchor=state.anchor.at[slot].set(first),
        done=state.done.at[slot].set(~last | stopped),
        controls=controls,
        target=target_cache,
        draft=write_slot(state.draft, own, slot),
    )
    logprobs = report_logprobs(logits, first[None, None], config.decode.logprobs)
    return state, FirstToken(first, jax.tree.map(lambda x: x[0, 0], logprobs))


def _draw_first(
    config: ModelConfig,
    logits: Float[Array, "1 1 V"],
    state: DecodeState,
    slot: Int[Array, ""],
    tokens: Int[Array, " chunk"],
    count: Int[Array, ""],
) -> tuple[Int[Array, ""], Controls]:
    """The token after a slot's rows, and the controls with the chunk in the prompt."""
    row, stop_ids = jax.tree.map(lambda x: x[slot][None], (state.sampling, state.stop_ids))
    position = (state.cached[slot] + count)[None]
    if not config.decode.controls:
        return draw_token(logits[0], row, position), state.controls
    controls = mark_prompt(state.controls, slot, tokens, count)
    own = jax.tree.map(lambda x: x[slot][None], controls)
    adjusted = adjust(logits[0], own, own.generated, position, stop_ids)
    first = draw_token(adjusted, row, position)
    # Chunks before the last draw too: what they draw is no output.
    generated = jnp.zeros_like(own.generated[0]).at[first].set(1)
    return first, replace(controls, generated=controls.generated.at[slot].set(generated))


@entry
def draft_step(
    config: ModelConfig, params: Params, state: DecodeState
) -> tuple[DecodeState, Proposal]:
    """The whole draft step: context rows into the draft cache, block backbone, Markov walk.

    Without a draft the proposal is empty: plain decoding is a round of no drafts. (What the step
    does is the drafter's business: `drafters`.)
    """
    return propose(config, params, state)


@entry
def verify_step(
    config: ModelConfig, params: Params, state: DecodeState, proposal: Proposal
) -> tuple[DecodeState, StepOutput]:
    """Run the target on the anchor and its drafts, accept a prefix, commit it.

    `state` is what `draft_step` returned with the proposal: of another, whose context still waits,
    the draft would never see those rows.
    """
    return verify_proposal(config, params, state, proposal)


@entry
def decode_round(
    config: ModelConfig, params: Params, state: DecodeState
) -> tuple[DecodeState, StepOutput]:
    """One round: draft, verify, accept, commit."""
    return run_round(config, params, state)


@entry
def decode_rounds(
    config: ModelConfig, params: Params, state: DecodeState, rounds: Int[Array, ""]
) -> tuple[DecodeState, Rounds]:
    """Up to `rounds` (at most MAX_ROUNDS) rounds in one while loop; ends early when all rows are
    finished. Nothing is read by the host in between."""
    batch, width = state.cached.shape[0], config.decode.step_rows
    reported = _logprobs_width(config)
    empty = Rounds(
        tokens=jnp.zeros((batch, MAX_ROUNDS, width), jnp.int32),
        counts=jnp.zeros((batch, MAX_ROUNDS, 4), jnp.int32),
        logprobs=Logprobs(
            ids=jnp.zeros((batch, MAX_ROUNDS, width, reported), jnp.int32),
            values=jnp.zeros((batch, MAX_ROUNDS, width, reported), jnp.float32),
        ),
        possible=jnp.zeros(
            (batch, MAX_ROUNDS, width - 1 if config.decode.ceiling else 0), jnp.float32
        ),
    )
    most = jnp.minimum(rounds, MAX_ROUNDS)

    def unfinished(carry: tuple[DecodeState, Rounds, Array]) -> Array:
        state, _, index = carry
        return (index < most) & ~jnp.all(state.done)

    def step(carry: tuple[DecodeState, Rounds, Array]) -> tuple[DecodeState, Rounds, Array]:
        state, out, index = carry
        state, one = run_round(config, params, state)
        row = Rounds(one.tokens, one.counts, one.logprobs, one.possible)
        out = jax.tree.map(lambda all_rounds, x: all_rounds.at[:, index].set(x), out, row)
        return state, out, index + 1

    state, out, _ = jax.lax.while_loop(unfinished, step, (state, empty, jnp.int32(0)))
    return state, out


def _logprobs_width(config: ModelConfig) -> int:
    count = min(config.decode.logprobs, config.target.vocab_size)
    return count + 1 if count else 0
