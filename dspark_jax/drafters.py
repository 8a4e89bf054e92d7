"""What proposes the tokens that the target verifies: three pure functions, chosen statically.

`init` makes the drafter's own state, `absorb` feeds it rows that were committed, `propose` offers
tokens after the anchor. Nothing outside this file knows which drafter runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dspark_jax.cache import allocate, capacity
from dspark_jax.config import DraftConfig, ModelConfig, NgramConfig
from dspark_jax.draft import Draft, block_tokens, propose, sampled_rows
from dspark_jax.layers import bind
from dspark_jax.state import ContextRows, DecodeState, Params, Proposal
from dspark_jax.target import Target

Absorb = Callable[[ModelConfig, Params, Any, ContextRows, Array, Array], Any]


@dataclass(frozen=True)
class Drafter:
    """init(config, batch) -> own state; absorb(config, params, own, rows, start, count) -> own,
    with row t of batch row b at position start[b] + t and only the first count[b] of them true;
    propose(config, params, state) -> (own, Proposal).
    """

    init: Callable[[ModelConfig, int], Any]
    absorb: Absorb
    propose: Callable[[ModelConfig, Params, DecodeState], tuple[Any, Proposal]]


def drafter_of(config: ModelConfig) -> Drafter:
    """The drafter that a configuration names."""
    if config.draft is None:
        return NONE
    return NGRAM if isinstance(config.draft, NgramConfig) else DSPARK


def taps_of(config: ModelConfig) -> tuple[int, ...]:
    """The target layers that the drafter wants to see."""
    return config.draft_network.taps if config.draft_network else ()


# A network over the target's features: DSpark, and DFlash as its rank-0 case.


def _network(config: ModelConfig, params: Params) -> Draft:
    return bind(Draft, config.draft, config.dtype, params["draft"])


def _init_cache(config: ModelConfig, batch: int) -> Any:
    assert isinstance(config.draft, DraftConfig)
    return allocate(config.draft.layers, batch, capacity(config), config.dtype)


def _absorb_context(
    config: ModelConfig,
    params: Params,
    cache: Any,
    rows: ContextRows,
    start: Int[Array, " B"],
    count: Int[Array, " B"],
) -> Any:
    """Keys and values of the rows' features go into the draft's cache."""
    draft = _network(config, params)
    with jax.named_scope("context_kv"):
        context = draft.context_rows(rows.features)
        return draft.write_context(context, cache, start, count, config.decode.implementation)


def _propose_block(config: ModelConfig, params: Params, state: DecodeState) -> tuple[Any, Proposal]:
    """Block backbone over the context, then the Markov walk."""
    assert isinstance(config.draft, DraftConfig)
    draft = _network(config, params)
    target = bind(Target, config.target, config.dtype, params["target"])
    embedding = draft.embed_tokens if config.draft.own_embedding else target.embed_tokens
    head = draft.lm_head.weight[...] if config.draft.own_head else target.head
    x = embedding(block_tokens(config.draft, state.anchor))
    hidden, cache = draft.block(x, state.draft, state.cached, config.decode.implementation)
    hidden = sampled_rows(config.draft, hidden, config.decode.num_drafts)
    return cache, propose(draft, hidden, head, state, config.decode)


DSPARK = Drafter(init=_init_cache, absorb=_absorb_context, propose=_propose_block)


# Prompt lookup: the text repeats itself.


def _init_history(config: ModelConfig, batch: int) -> Int[Array, "B S"]:
    return jnp.zeros((batch, capacity(config)), jnp.int32)


def _absorb_tokens(
    config: ModelConfig,
    params: Params,
    history: Int[Array, "B S"],
    rows: ContextRows,
    start: Int[Array, " B"],
    count: Int[Array, " B"],
) -> Int[Array, "B S"]:
    batch, width = rows.tokens.shape
    offsets = jnp.arange(width)
    places = jnp.where(offsets < count[:, None], start[:, None] + offsets, history.shape[1])
    return history.at[jnp.arange(batch)[:, None], places].set(rows.tokens, mode="drop")


def _propose_lookup(
    config: ModelConfig, params: Params, state: DecodeState
) -> tuple[Any, Proposal]:
    """Continue as the text went on after the latest of the longest earlier matches of its end.

    A match may overlap the end; the continuation then goes round the period it found.
    """
    assert isinstance(config.draft, NgramConfig)
    rows = jnp.arange(state.cached.shape[0])
    history = state.draft.at[rows, state.cached].set(state.anchor)
    match = _match_lengths(history, state.cached, config.draft.max_match)
    size = history.shape[1]
    latest = jnp.argmax(match * size + jnp.arange(size), axis=1).astype(jnp.int32)
    found = match[rows, latest] >= config.draft.min_match
    period = state.cached - latest
    slots = jnp.arange(config.decode.num_drafts)
    places = latest[:, None] + 1 + slots % jnp.maximum(period, 1)[:, None]
    tokens = history[rows[:, None], places]
    return history, Proposal(
        tokens=tokens,
        length=jnp.where(found, config.decode.num_drafts, 0),
        probs=_certain(config, tokens),
        confidence=jnp.zeros((tokens.shape[0], 0), jnp.float32),
    )


def _match_lengths(
    history: Int[Array, "B S"], cached: Int[Array, " B"], most: int
) -> Int[Array, "B S"]:
    """How many tokens up to each earlier position equal those up to the anchor, at most `most`."""
    positions = jnp.arange(history.shape[1])
    running = positions < cached[:, None]
    lengths = jnp.zeros_like(history)
    for back in range(most):
        ending = jnp.take_along_axis(history, jnp.maximum(cached - back, 0)[:, None], axis=1)
        shifted = jnp.roll(history, back, axis=1)
        running &= (shifted == ending) & (positions >= back)
        lengths += running
    return lengths


def _certain(config: ModelConfig, tokens: Int[Array, "B P"]) -> Float[Array, "B P V"]:
    """The law of a drafter that does not draw: all on its token."""
    width = config.target.vocab_size if config.decode.sampled else 0
    return jax.nn.one_hot(tokens, width, dtype=jnp.float32)


NGRAM = Drafter(init=_init_history, absorb=_absorb_tokens, propose=_propose_lookup)


# Plain decoding: a round of no drafts.


def _propose_nothing(
    config: ModelConfig, params: Params, state: DecodeState
) -> tuple[Any, Proposal]:
    batch = state.cached.shape[0]
    tokens = jnp.zeros((batch, 0), jnp.int32)
    return state.draft, Proposal(
        tokens=tokens,
        length=jnp.zeros((batch,), jnp.int32),
        probs=_certain(config, tokens),
        confidence=jnp.zeros((batch, 0), jnp.float32),
    )


NONE = Drafter(
    init=lambda config, batch: (),
    absorb=lambda config, params, own, rows, start, count: own,
    propose=_propose_nothing,
)
