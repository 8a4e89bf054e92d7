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
from jaxtyping import Array, Bool, Float, Int, Key, UInt32

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
        scaled = truncate_logits(scaled, sampling)
    return jnp.where(greedy, one_hot_law(logits), jax.nn.softmax(scaled, axis=-1))


def truncate_logits(scaled: Float[Array, "B T V"], sampling: Sampling) -> Float[Array, "B T V"]:
    """Set what top-k, top-p and min-p remove to -inf; each filter sees what the last one left.

    A filter that no row of the batch uses costs nothing.
    """
    drawn = ~is_greedy(sampling)
    top_k, top_p, min_p = (
        setting[:, None, None] for setting in (sampling.top_k, sampling.top_p, sampling.min_p)
    )
    filters = (
        (sampling.top_k > 0, lambda x: jnp.where(_in_top_k(x, top_k), x, -jnp.inf)),
        (sampling.top_p < 1.0, lambda x: jnp.where(_in_top_p(x, top_p), x, -jnp.inf)),
        (sampling.min_p > 0.0, lambda x: jnp.where(_above_min_p(x, min_p), x, -jnp.inf)),
    )
    for used, cut in filters:
        scaled = jax.lax.cond(jnp.any(used & drawn), cut, lambda x: x, scaled)
    return scaled


def _in_top_k(logits: Float[Array, "B T V"], top_k: Int[Array, "B 1 1"]) -> Bool[Array, "B T V"]:
    """The k largest; ties with the k-th stay, as in transformers."""
    size = logits.shape[-1]
    unsigned_zero = jnp.where(logits == 0, 0.0, logits)  # -0.0 ties with 0.0
    bits = jax.lax.bitcast_convert_type(unsigned_zero, jnp.uint32)
    # Order of the integers = order of the floats: flip negative ones, lift the others.
    keys = jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))
    wanted = jnp.where(top_k > 0, jnp.minimum(top_k, size), size).astype(jnp.float32)
    return keys >= _threshold(keys, jnp.ones_like(logits), wanted)


def _in_top_p(logits: Float[Array, "B T V"], top_p: Float[Array, "B 1 1"]) -> Bool[Array, "B T V"]:
    """The ids that fewer than top_p of the mass is likelier than; of ties the last ones, as a
    stable ascending sort leaves them (transformers' own sort is not stable)."""
    law = jax.nn.softmax(logits, axis=-1)
    keys = jax.lax.bitcast_convert_type(law, jnp.uint32)  # no negative floats: already in order
    edge = _threshold(keys, law, top_p)
    above, level = keys > edge, keys == edge
    mass = jnp.sum(jnp.where(above, law, 0.0), axis=-1, keepdims=True)
    before = mass + law * (jax.lax.cumsum(level.astype(jnp.int32), axis=2, reverse=True) - 1)
    return above | (level & (before < top_p)) | (top_p >= 1.0)


def _above_min_p(
    logits: Float[Array, "B T V"], min_p: Float[Array, "B 1 1"]
) -> Bool[Array, "B T V"]:
    law = jax.nn.softmax(logits, axis=-1)
    return law >= min_p * jnp.max(law, axis=-1, keepdims=True)


def _threshold(
    keys: UInt32[Array, "B T V"], weights: Float[Array, "B T V"], wanted: Float[Array, "B _ 1"]
) -> UInt32[Array, "B T 1"]:
    """The largest key such that the keys from it upward weigh at least `wanted`.

    Found bit by bit: 32 passes that read the row, where a sort of a vocabulary would be dearer.
    """

    def settle(index: Array, edge: Array) -> Array:
        higher = edge | (jnp.uint32(1 << 31) >> index.astype(jnp.uint32))
        weight = jnp.sum(jnp.where(keys >= higher, weights, 0.0), axis=-1, keepdims=True)
        return jnp.where(weight >= wanted, higher, edge)

    return jax.lax.fori_loop(0, 32, settle, jnp.zeros((*keys.shape[:-1], 1), jnp.uint32))


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
