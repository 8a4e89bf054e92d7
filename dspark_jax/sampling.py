"""Logits to law, the key schedule, and the draw. A law is a float32 array of probabilities, and
the array that is drawn from is the array that enters every ratio.

Three disjoint random streams. The target's draws are keyed by (seed, position of the drawn
token); the draft's draws and the acceptance coins by (seed, position of the anchor, slot), because
a position is often drafted again in a later round, and noise that a verification has already
looked at is no longer fresh. In Gumbel verification the draft uses the target's stream on purpose.
"""

from __future__ import annotations

from enum import IntEnum

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from dspark_jax.config import GREEDY_TEMPERATURE
from dspark_jax.state import Logprobs, Sampling


class Stream(IntEnum):
    """The random streams; the value is folded into the key first."""

    TARGET = 0
    DRAFT = 1
    COIN = 2


def stream_keys(
    sampling: Sampling, stream: Stream, position: Int[Array, " B"], slot: Int[Array, ""] | int = 0
) -> Key[Array, " B"]:
    """One key a row; distinct for every (seed, stream, position, slot)."""

    def key(seed: Array, place: Array) -> Array:
        root = jax.random.wrap_key_data(seed, impl="threefry2x32")
        for word in (int(stream), place, slot):
            root = jax.random.fold_in(root, word)
        return root

    return jax.vmap(key)(sampling.seed, position)


def gumbel_noise(keys: Key[Array, " B"], size: int) -> Float[Array, "B size"]:
    """Standard Gumbel noise over target ids.

    Mode "high": with the usual 23 bits an id of probability below 1e-7 could never win, which a
    vocabulary of 150,000 ids would feel.
    """
    return jax.vmap(lambda key: jax.random.gumbel(key, (size,), jnp.float32, mode="high"))(keys)


def coins(sampling: Sampling, anchor: Int[Array, " B"], count: int) -> Float[Array, "B P"]:
    """Uniform acceptance coins in [0, 1), one a slot of the round anchored at `anchor`."""
    keys = jax.vmap(lambda slot: stream_keys(sampling, Stream.COIN, anchor, slot), out_axes=1)(
        jnp.arange(count)
    )
    return jax.vmap(jax.vmap(lambda key: jax.random.uniform(key, (), jnp.float32)))(keys)


def largest(values: Float[Array, "*rows M"]) -> Int[Array, "*rows"]:
    """Index of the first largest value: argmax as two plain reductions, which a CPU vectorises."""
    size = values.shape[-1]
    best = jnp.max(values, axis=-1, keepdims=True)
    places = jnp.where(values == best, jnp.arange(size, dtype=jnp.int32), size)
    # A row of NaN has no largest value; the clip keeps its index a legal id.
    return jnp.minimum(jnp.min(places, axis=-1), size - 1)


def draw(law: Float[Array, "*rows M"], noise: Float[Array, "*rows M"]) -> Int[Array, "*rows"]:
    """Gumbel-max draw: the largest log law + noise; an id of probability zero is never drawn."""
    return largest(jnp.where(law > 0, jnp.log(law) + noise, -jnp.inf))


def is_greedy(sampling: Sampling) -> Bool[Array, " B"]:
    return sampling.temperature < GREEDY_TEMPERATURE


def one_hot_law(logits: Float[Array, "B T V"]) -> Float[Array, "B T V"]:
    """All probability on the first largest logit."""
    return jax.nn.one_hot(largest(logits), logits.shape[-1], dtype=jnp.float32)


def token_law(
    logits: Float[Array, "B T V"], sampling: Sampling, *, truncate: bool = True
) -> Float[Array, "B T V"]:
    """The law a row draws its next token from: temperature, top-k, top-p, min-p, softmax.

    The order and the edge cases are those of transformers' logits warpers. A greedy row's law is
    one-hot. `truncate=False` leaves the three filters out.
    """
    greedy = is_greedy(sampling)[:, None, None]
    temperature = sampling.temperature[:, None, None]
    scaled = logits.astype(jnp.float32) / jnp.where(greedy, 1.0, temperature)
    if truncate:
        filtered = (sampling.top_k > 0) | (sampling.top_p < 1.0) | (sampling.min_p > 0.0)
        scaled = jax.lax.cond(
            jnp.any(filtered & ~is_greedy(sampling)), _truncate, lambda x, _: x, scaled, sampling
        )
    return jnp.where(greedy, one_hot_law(logits), jax.nn.softmax(scaled, axis=-1))


def _truncate(scaled: Float[Array, "B T V"], sampling: Sampling) -> Float[Array, "B T V"]:
    """Set what top-k, top-p and min-p remove to -inf; each filter sees what the last one left."""
    size = scaled.shape[-1]
    top_k, top_p, min_p = (
        setting[:, None, None] for setting in (sampling.top_k, sampling.top_p, sampling.min_p)
    )
    # Largest first, and among equals the higher id: transformers sorts upwards and drops the head.
    order = jnp.flip(jnp.argsort(scaled, axis=-1, stable=True), axis=-1)
    ranked = jnp.take_along_axis(scaled, order, axis=-1)
    # Ties with the k-th largest stay, as in transformers.
    last = jnp.take_along_axis(ranked, jnp.clip(top_k, 1, size) - 1, axis=-1)
    ranked = jnp.where((top_k > 0) & (ranked < last), -jnp.inf, ranked)
    law = jax.nn.softmax(ranked, axis=-1)
    before = jnp.cumsum(law, axis=-1) - law  # mass of the likelier ids
    first = jnp.arange(size) == 0
    ranked = jnp.where((before < top_p) | (top_p >= 1.0) | first, ranked, -jnp.inf)
    law = jax.nn.softmax(ranked, axis=-1)
    ranked = jnp.where((law >= min_p * law[..., :1]) | first, ranked, -jnp.inf)
    return jnp.put_along_axis(scaled, order, ranked, axis=-1, inplace=False)


def draw_token(
    logits: Float[Array, "1 V"], sampling: Sampling, position: Int[Array, " 1"]
) -> Int[Array, ""]:
    """One row's token at `position`, from the target's stream; a greedy row builds no law."""

    def sampled(logits: Array) -> Array:
        law = token_law(logits[None], sampling)[0]
        keys = stream_keys(sampling, Stream.TARGET, position)
        return draw(law, gumbel_noise(keys, law.shape[-1]))[0]

    def greedy(logits: Array) -> Array:
        return largest(logits)[0]

    return jax.lax.cond(is_greedy(sampling)[0], greedy, sampled, logits).astype(jnp.int32)


def report_logprobs(
    logits: Float[Array, "B T V"], tokens: Int[Array, "B T"], count: int
) -> Logprobs:
    """Log-probability of each token and of the `count` most likely ones (0: report nothing)."""
    if count == 0:
        empty = jnp.zeros((*tokens.shape, 0))
        return Logprobs(ids=empty.astype(jnp.int32), values=empty.astype(jnp.float32))
    law = jax.nn.log_softmax(logits, axis=-1)
    values, ids = jax.lax.top_k(law, min(count, law.shape[-1]))
    own = jnp.take_along_axis(law, tokens[..., None], axis=-1)
    return Logprobs(
        ids=jnp.concatenate([tokens[..., None], ids], axis=-1),
        values=jnp.concatenate([own, values], axis=-1),
    )
