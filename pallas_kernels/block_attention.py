"""Attention of a block of new rows over a ragged cache, for verification, decoding and drafting.

The T rows of each batch row have already been written into the caches at rows `start` ..
`start + T - 1`; query t sits at position `start + t`. It sees key j if

- `j <= start + t` when causal, otherwise `j < start + T` (the block sees all of itself), and
- `j > start + t - window` when `window` is above 0.

Cache rows past those may hold any finite numbers and change nothing. Query heads `k * G` ..
`k * G + G - 1` read key head k, which is never repeated. Scores are scaled by `H ** -0.5`; the
softmax and every accumulation are float32; the result has the dtype of the queries.
"""

from __future__ import annotations

from functools import partial

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.platform import resolve_implementation

FIRST_TIER = 256
TIER_GROWTH = 4


def length_tiers(cache_rows: int) -> tuple[int, ...]:
    """Return the static lengths that the reference reads: 256, 1024, ... and the whole cache."""
    tiers = []
    length = FIRST_TIER
    while length < cache_rows:
        tiers.append(length)
        length *= TIER_GROWTH
    return (*tiers, cache_rows)


def _attend(
    q: Float[Array, "B T N H"],
    k_cache: Float[Array, "B S K H"],
    v_cache: Float[Array, "B S K H"],
    start: Int[Array, " B"],
    *,
    length: int,
    causal: bool,
    window: int,
) -> Float[Array, "B T N H"]:
    """Attend to the first `length` cache rows."""
    batch, rows, _, width = q.shape
    k, v = k_cache[:, :length], v_cache[:, :length]
    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    dot = partial(jnp.einsum, precision=precision, preferred_element_type=jnp.float32)
    grouped = q.reshape(batch, rows, k.shape[2], -1, width)
    scores = dot("btkgh,bskh->bkgts", grouped, k) * width**-0.5

    position = start[:, None, None] + jnp.arange(rows)[None, :, None]
    key = jnp.arange(length)[None, None, :]
    visible = key <= position if causal else key < start[:, None, None] + rows
    if window > 0:
        visible &= key > position - window
    scores = jnp.where(visible[:, None, None], scores, -jnp.inf)

    weights = jnp.exp(scores - scores.max(axis=-1, keepdims=True))
    total = weights.sum(axis=-1)[..., None]
    out = dot("bkgts,bskh->bkgth", weights.astype(v.dtype), v) / total
    return out.transpose(0, 3, 1, 2, 4).reshape(q.shape).astype(q.dtype)


def block_attention_reference(
    q: Float[Array, "B T N H"],
    k_cache: Float[Array, "B S K H"],
    v_cache: Float[Array, "B S K H"],
    start: Int[Array, " B"],
    *,
    causal: bool,
    window: int = 0,
) -> Float[Array, "B T N H"]:
    """Compute the op in jax.numpy, for any T.

    Reads the smallest of a few static lengths that holds the longest row, so the cost follows
    what is cached and not what is allocated.
    """
    tiers = length_tiers(k_cache.shape[1])
    branches = [partial(_attend, length=n, causal=causal, window=window) for n in tiers]
    if len(tiers) == 1:
        return branches[0](q, k_cache, v_cache, start)
    needed = start.max() + q.shape[1]
    tier = sum((needed > n).astype(jnp.int32) for n in tiers[:-1])
    return lax.switch(tier, branches, q, k_cache, v_cache, start)


def block_attention(
    q: Float[Array, "B T N H"],
    k_cache: Float[Array, "B S K H"],
    v_cache: Float[Array, "B S K H"],
    start: Int[Array, " B"],
    *,
    causal: bool,
    window: int = 0,
    implementation: str = "auto",
) -> Float[Array, "B T N H"]:
    """Attend from T new rows to the cache they were written into; see the module's contract.

    Args:
        q: queries at positions `start` .. `start + T - 1`, rotated.
        k_cache, v_cache: one layer's caches, the block's own rows included.
        start: cached rows before the block; `start + T <= S`.
        causal: whether a query sees only the block rows up to its own.
        window: rows a query sees, its own included; 0 is all.
        implementation: "auto", "pallas" or "xla".

    Raises:
        ValueError: the shapes do not fit, or `implementation` cannot run here.
    """
    if q.shape[2] % k_cache.shape[2] or q.shape[3] != k_cache.shape[3]:
        raise ValueError(f"queries {q.shape} do not fit the key cache {k_cache.shape}")
    if q.shape[1] > k_cache.shape[1]:
        raise ValueError(f"{q.shape[1]} rows do not fit a cache of {k_cache.shape[1]} rows")
    resolve_implementation(implementation)
    return block_attention_reference(q, k_cache, v_cache, start, causal=causal, window=window)
