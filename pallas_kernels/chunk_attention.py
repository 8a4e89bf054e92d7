"""Causal attention of a prompt chunk over the cache that it was written into, by cuDNN.

The same op as `block_attention`, for more rows than its kernel takes. cuDNN counts a causal mask
from the first query and the first key: a chunk at the start of its row is causal as it stands,
later chunks bring a mask of their own along.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.platform import cuda_capability

FLASH_CAPABILITY = (8, 0)  # the first that cuDNN's flash attention runs on
WIDEST_HEAD, WIDEST_HEAD_HOPPER = 128, 256
LEAST_UNIT, UNIT_TILE = 256, 64  # of the lengths read, in cache rows
STEPS = 4  # lengths a doubling: at most a quarter more is read than needed


def cudnn_serves(dtype: Any, head_dim: int) -> bool:
    """Return whether cuDNN's flash attention takes these operands on the device in use."""
    capability = cuda_capability()
    if capability is None or capability < FLASH_CAPABILITY:
        return False
    widest = WIDEST_HEAD_HOPPER if capability >= (9, 0) else WIDEST_HEAD
    half = jnp.dtype(dtype) in (jnp.bfloat16, jnp.float16)
    return half and head_dim <= widest and head_dim % 8 == 0


def chunk_tiers(rows: int, cache_rows: int) -> tuple[int, ...]:
    """Return the static lengths that chunks of `rows` read: 1, 2, ..., 8, 10, 12, 14, 16, 20, ...

    chunks, and the whole cache.
    """
    unit = -(-max(rows, LEAST_UNIT) // UNIT_TILE) * UNIT_TILE
    counts = [*range(1, STEPS)]
    counts += [step << power for power in range(32) for step in range(STEPS, 2 * STEPS)]
    return (*(count * unit for count in counts if count * unit < cache_rows), cache_rows)


def chunk_attention(
    q: Float[Array, "B T N H"],
    k_cache: Float[Array, "B S K H"],
    v_cache: Float[Array, "B S K H"],
    start: Int[Array, " B"],
    *,
    window: int = 0,
    implementation: Any = "cudnn",
) -> Float[Array, "B T N H"]:
    """Attend from T new rows to the cache rows up to each; see the module.

    Args:
        q: queries at positions `start` .. `start + T - 1`, rotated.
        k_cache, v_cache: one layer's caches, the chunk's own rows included; rows past them hold
            any finite numbers.
        start: cached rows before the chunk; `start + T <= S`.
        window: rows a query sees, its own included; 0 is all.
        implementation: of `jax.nn.dot_product_attention`, "cudnn" or "xla".
    """
    attend = partial(jax.nn.dot_product_attention, implementation=implementation)
    rows = q.shape[1]

    def first(q: Array, k: Array, v: Array, start: Array) -> Array:
        seen = (window - 1, 0) if window else None
        return attend(q, k[:, :rows], v[:, :rows], is_causal=True, local_window_size=seen)

    def later(q: Array, k: Array, v: Array, start: Array, length: int) -> Array:
        position = start[:, None, None] + jnp.arange(rows)[:, None]
        key = jnp.arange(length)
        visible = key <= position
        if window:
            visible &= key > position - window
        return attend(q, k[:, :length], v[:, :length], mask=visible[:, None])

    tiers = chunk_tiers(rows, k_cache.shape[1])
    needed = start.max() + rows
    tier = sum((needed > length for length in tiers[:-1]), jnp.int32(1))
    branches: list[Any] = [first, *(partial(later, length=length) for length in tiers)]
    choice = jnp.where(start.max() > 0, tier, 0)
    return lax.switch(choice, branches, q, k_cache, v_cache, start)
