"""Put the context rows of all draft layers into their caches, from one fused projection.

A row of `kv` holds, for layer 0, K key heads and then K value heads, then the same for layer 1,
and so on. Key heads are RMS-normalised with their layer's weights (unless they are None) and
rotated to the row's position. Row t of batch row b lands in cache row `start[b] + t` of every
layer if `t < count[b]`; a row past the cache's end is dropped; every other cache row keeps its
value. Rows of `kv` at or past `count[b]` may hold any finite numbers and change nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.platform import resolve_implementation
from pallas_kernels.rotary import normalize_heads, rotate

Caches = Sequence[Float[Array, "B S K H"]]


def context_kv_reference(
    kv: Float[Array, "B T P"],
    k_norms: Float[Array, "L H"] | None,
    cos: Float[Array, "B T half"],
    sin: Float[Array, "B T half"],
    k_caches: Caches,
    v_caches: Caches,
    start: Int[Array, " B"],
    count: Int[Array, " B"],
    *,
    eps: float = 1e-6,
) -> tuple[list[Float[Array, "B S K H"]], list[Float[Array, "B S K H"]]]:
    """Compute the op in jax.numpy, for any T."""
    batch, rows, _ = kv.shape
    _, cache_rows, kv_heads, width = k_caches[0].shape
    heads = kv.reshape(batch, rows, len(k_caches), 2, kv_heads, width)
    weight = None if k_norms is None else k_norms[None, None, :, None, :]
    k = rotate(normalize_heads(heads[:, :, :, 0], weight, eps), cos, sin)
    v = heads[:, :, :, 1]
    slot = jnp.arange(batch)[:, None]
    t = jnp.arange(rows)
    row = jnp.where(t < count[:, None], start[:, None] + t, cache_rows)
    k_out = [c.at[slot, row].set(k[:, :, i], mode="drop") for i, c in enumerate(k_caches)]
    v_out = [c.at[slot, row].set(v[:, :, i], mode="drop") for i, c in enumerate(v_caches)]
    return k_out, v_out


def context_kv(
    kv: Float[Array, "B T P"],
    k_norms: Float[Array, "L H"] | None,
    cos: Float[Array, "B T half"],
    sin: Float[Array, "B T half"],
    k_caches: Caches,
    v_caches: Caches,
    start: Int[Array, " B"],
    count: Int[Array, " B"],
    *,
    eps: float = 1e-6,
    implementation: str = "auto",
) -> tuple[list[Float[Array, "B S K H"]], list[Float[Array, "B S K H"]]]:
    """Return all layers' caches with the first `count` context rows written.

    Args:
        kv: the projection's output, P = L * 2 * K * H wide.
        k_norms: RMSNorm weights of all layers, or None for a network without them.
        cos, sin: float32, H/2 wide, of each row's position (attention factor included).
        k_caches, v_caches: one cache a layer; donate them to write in place.
        start: the cache row that row 0 of each batch row goes to.
        count: rows of each batch row to write, 0 .. T.
        eps: of the RMSNorm.
        implementation: "auto", "pallas" or "xla".

    Raises:
        ValueError: the shapes do not fit, or `implementation` cannot run here.
    """
    kv_heads, width = k_caches[0].shape[2:]
    if len(k_caches) != len(v_caches) or kv.shape[2] != len(k_caches) * 2 * kv_heads * width:
        raise ValueError(
            f"a projection of shape {kv.shape} does not fit {len(k_caches)} key and"
            f" {len(v_caches)} value caches {k_caches[0].shape}"
        )
    resolve_implementation(implementation)
    return context_kv_reference(kv, k_norms, cos, sin, k_caches, v_caches, start, count, eps=eps)
