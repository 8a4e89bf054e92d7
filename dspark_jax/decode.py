"""The jitted entry points: prefill, draft, verify, round, rounds. The only jits of a run.

All are pure functions of (params, state) with the static `ModelConfig` first; the state is donated.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dspark_jax.cache import allocate, capacity, read_slot, write_slot
from dspark_jax.config import LayersConfig, ModelConfig
from dspark_jax.controls import adjust, admit_controls, count_generated, init_controls, mark_prompt
from dspark_jax.draft import Draft, block_tokens, propose, sampled_rows
from dspark_jax.layers import bind
from dspark_jax.sampling import draw_token, report_logprobs
from dspark_jax.state import (
    MAX_ROUNDS,
    MAX_STOP_IDS,
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
from dspark_jax.target import Target
from dspark_jax.verify import is_stop, verify

entry: Callable[..., Any] = partial(jax.jit, static_argnums=0, donate_argnames=("state",))


def init_state(config: ModelConfig, batch: int) -> DecodeState:
    """An empty state of `batch` slots, all finished, with caches of `cache.capacity` rows."""
    rows = capacity(config)
    draft, layers = config.draft, config.target.layers
    features = len(draft.taps) * layers.hidden_size if draft else 0
    none = LayersConfig(1, 1, 1, 1, 1, 2, layers.rope)  # a draft cache of no rows

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
        target=allocate(layers, batch, rows, config.dtype),
        draft=allocate(draft.layers if draft else none, batch, rows if draft else 0, config.dtype),
        context=jnp.zeros((batch, config.decode.step_rows, features), config.dtype),
        context_len=integers(0),
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
    return state.replace(
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
    decode = config.decode
    start = state.cached[slot][None]
    target = _target(config, params)
    with jax.named_scope("prefill"):
        hidden, tapped, part = target(
            tokens[None],
            read_slot(state.target, slot),
            start,
            config.draft.taps if config.draft else (),
            decode.implementation,
        )
        target_cache = write_slot(state.target, part, slot)
        draft_cache = state.draft
        if config.draft:
            draft = _draft(config, params)
            part = draft.write_context(
                draft.context_rows(tapped),
                read_slot(state.draft, slot),
                start,
                count[None],
                decode.implementation,
            )
            draft_cache = write_slot(state.draft, part, slot)
        logits = target.logits(jax.lax.dynamic_slice_in_dim(hidden, count - 1, 1, axis=1))
    cached = state.cached[slot] + count
    first, controls = _draw_first(config, logits, state, slot, tokens, count)
    stopped = is_stop(first[None, None], state.stop_ids[slot][None])[0, 0]
    state = state.replace(
        cached=state.cached.at[slot].set(cached),
        anchor=state.anchor.at[slot].set(first),
        done=state.done.at[slot].set(~last | stopped),
        controls=controls,
        target=target_cache,
        draft=draft_cache,
    )
    logprobs = report_logprobs(logits, first[None, None], decode.logprobs)
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
    return first, controls.replace(generated=controls.generated.at[slot].set(generated))


@entry
def draft_step(
    config: ModelConfig, params: Params, state: DecodeState
) -> tuple[DecodeState, Proposal]:
    """The whole draft step: context rows into the draft cache, block backbone, Markov walk.

    Without a draft the proposal is empty: plain decoding is a round of no drafts.
    """
    return _draft_step(config, params, state)


@entry
def verify_step(
    config: ModelConfig, params: Params, state: DecodeState, proposal: Proposal
) -> tuple[DecodeState, StepOutput]:
    """Run the target on the anchor and its drafts, accept a prefix, commit it."""
    return _verify_step(config, params, state, proposal)


@entry
def decode_round(
    config: ModelConfig, params: Params, state: DecodeState
) -> tuple[DecodeState, StepOutput]:
    """One round: draft, verify, accept, commit."""
    return _decode_round(config, params, state)


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
    )
    most = jnp.minimum(rounds, MAX_ROUNDS)

    def unfinished(carry: tuple[DecodeState, Rounds, Array]) -> Array:
        state, _, index = carry
        return (index < most) & ~jnp.all(state.done)

    def step(carry: tuple[DecodeState, Rounds, Array]) -> tuple[DecodeState, Rounds, Array]:
        state, out, index = carry
        state, one = _decode_round(config, params, state)
        one = Rounds(tokens=one.tokens, counts=one.counts, logprobs=one.logprobs)
        out = jax.tree.map(lambda all_rounds, x: all_rounds.at[:, index].set(x), out, one)
        return state, out, index + 1

    state, out, _ = jax.lax.while_loop(unfinished, step, (state, empty, jnp.int32(0)))
    return state, out


def _logprobs_width(config: ModelConfig) -> int:
    count = min(config.decode.logprobs, config.target.vocab_size)
    return count + 1 if count else 0


def _target(config: ModelConfig, params: Params) -> Target:
    return bind(Target, config.target, config.dtype, params["target"])


def _draft(config: ModelConfig, params: Params) -> Draft:
    return bind(Draft, config.draft, config.dtype, params["draft"])


def _decode_round(
    config: ModelConfig, params: Params, state: DecodeState
) -> tuple[DecodeState, StepOutput]:
    state, proposal = _draft_step(config, params, state)
    return _verify_step(config, params, state, proposal)


def _draft_step(
    config: ModelConfig, params: Params, state: DecodeState
) -> tuple[DecodeState, Proposal]:
    if config.draft is None:
        return state, _empty_proposal(config, state)
    with jax.named_scope("dspark_propose"):
        draft, target = _draft(config, params), _target(config, params)
        with jax.named_scope("context_kv"):
            rows = draft.context_rows(state.context)
            cache = draft.write_context(
                rows,
                state.draft,
                state.cached - state.context_len,
                state.context_len,
                config.decode.implementation,
            )
        embedding = draft.embed_tokens if config.draft.own_embedding else target.embed_tokens
        head = draft.lm_head.weight[...] if config.draft.own_head else target.head
        x = embedding(block_tokens(config.draft, state.anchor))
        hidden, cache = draft.block(x, cache, state.cached, config.decode.implementation)
        hidden = sampled_rows(config.draft, hidden, config.decode.num_drafts)
        proposal = propose(draft, hidden, head, state, config.decode)
    return state.replace(draft=cache), proposal


def _empty_proposal(config: ModelConfig, state: DecodeState) -> Proposal:
    batch = state.cached.shape[0]
    width = config.target.vocab_size if config.decode.sampled else 0
    return Proposal(
        tokens=jnp.zeros((batch, 0), jnp.int32),
        length=jnp.zeros((batch,), jnp.int32),
        probs=jnp.zeros((batch, 0, width), jnp.float32),
        confidence=jnp.zeros((batch, 0), jnp.float32),
    )


def _verify_step(
    config: ModelConfig, params: Params, state: DecodeState, proposal: Proposal
) -> tuple[DecodeState, StepOutput]:
    target = _target(config, params)
    with jax.named_scope("target_verify"):
        tokens = jnp.concatenate([state.anchor[:, None], proposal.tokens], axis=1)
        hidden, tapped, cache = target(
            tokens,
            state.target,
            state.cached,
            config.draft.taps if config.draft else (),
            config.decode.implementation,
        )
        logits = target.logits(hidden)
    with jax.named_scope("decode_sample"):
        output = verify(logits, proposal, state, config.decode)
        state = commit(state.replace(target=cache), output, tapped)
        if config.decode.controls:
            counted = count_generated(state.controls, output.tokens, output.counts[:, 0])
            state = state.replace(controls=counted)
    return state, output


def commit(state: DecodeState, output: StepOutput, tapped: Float[Array, "B T CD"]) -> DecodeState:
    """Advance `cached`, not past the limit; a row that was finished before stays as it was."""
    emitted, finished = output.counts[:, 0], state.done
    advance = jnp.minimum(emitted, state.limit - state.cached)
    places = jnp.maximum(emitted - 1, 0)[:, None]
    anchor = jnp.take_along_axis(output.tokens, places, axis=1)[:, 0]
    return state.replace(
        cached=jnp.where(finished, state.cached, state.cached + advance),
        anchor=jnp.where(finished, state.anchor, anchor),
        done=output.counts[:, 3] > 0,
        context=jnp.where(finished[:, None, None], state.context, tapped),
        # Cut like `cached`: the next draft writes the context at their difference.
        context_len=jnp.where(finished, state.context_len, advance),
    )
