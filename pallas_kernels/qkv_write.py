"""From the fused projection to attention: norm and rotate q and k, write k and v into the cache.

A row of `qkv` holds N query heads, then K key heads, then K value heads. Query and key heads are
RMS-normalised (unless the weights are None) and rotated to the row's position; values go into the
cache as they are. Row t of batch row b lands in cache row `start[b] + t`, in place when the
caches are donated; a row past the cache's end is dropped; every other cache row keeps its value.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.platform import resolve_implementation
from pallas_kernels.rotary import normalize_heads, rotate


def qkv_write_reference(
    qkv: Float[Array, "B T P"],
    q_norm: Float[Array, " H"] | None,
    k_norm: Float[Array, " H"] | None,
    cos: Float[Array, "B T half"],
    sin: Float[Array, "B T half"],
    k_cache: Float[Array, "B S K H"],
    v_cache: Float[Array, "B S K H"],
    start: Int[Array, " B"],
    *,
    eps: float = 1e-6,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B S K H"], Float[Array, "B S K H"]]:
    """Compute the op in jax.numpy, for any T."""
    batch, rows, _ = qkv.shape
    _, _, kv_heads, width = k_cache.shape
    heads = qkv.reshape(batch, rows, -1, width)
    q, k, v = jnp.split(heads, [heads.shape[2] - 2 * kv_heads, heads.shape[2] - kv_heads], axis=2)
    q = rotate(normalize_heads(q, q_norm, eps), cos, sin)
    k = rotate(normalize_heads(k, k_norm, eps), cos, sin)
    slot = jnp.arange(batch)[:, None]
    row = start[:, None] + jnp.arange(rows)
    k_cache = k_cache.at[slot, row].set(k, mode="drop")
    v_cache = v_cache.at[slot, row].set(v, mode="drop")
    return q, k_cache, v_cache


def qkv_write(
    qkv: Float[Array, "B T P"],
    q_norm: Float[Array, " H"] | None,
    k_norm: Float[Array, " H"] | None,
    cos: Float[Array, "B T half"],
    sin: Float[Array, "B T half"],
    k_cache: Float[Array, "B S K H"],
    v_cache: Float[Array, "B S K H"],
    start: Int[Array, " B"],
    *,
    eps: float = 1e-6,
    implementation: str = "auto",
) -> tuple[Float[Array, "B T N H"], Float[Array, "B S K H"], Float[Array, "B S K H"]]:
    """Norm, rotate and split a fused projection; return q and the caches with k and v written.

    Args:
        qkv: the projection's output, P = (N + 2K) * H wide.
        q_norm, k_norm: RMSNorm weights, both None for a network without them.
        cos, sin: float32, H/2 wide, of each row's position (attention factor included).
        k_cache, v_cache: one layer's caches; donate them to write in place.
        start: the cache row that row 0 of each batch row goes to.
        eps: of the RMSNorm.
        implementation: "auto", "pallas" or "xla".

    Raises:
        ValueError: the shapes do not fit, or `implementation` cannot run here.
    """
    kv_heads, width = k_cache.shape[2:]
    if qkv.shape[2] % width or qkv.shape[2] // width <= 2 * kv_heads:
        raise ValueError(f"a projection of shape {qkv.shape} does not fit caches {k_cache.shape}")
    if (q_norm is None) != (k_norm is None):
        raise ValueError("q_norm and k_norm must both be given or both be None")
    resolve_implementation(implementation)
    return qkv_write_reference(qkv, q_norm, k_norm, cos, sin, k_cache, v_cache, start, eps=eps)
