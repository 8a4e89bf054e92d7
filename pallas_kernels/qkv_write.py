"""From the fused projection to attention: norm and rotate q and k, write k and v into the cache.

A row of `qkv` holds N query heads, then K key heads, then K value heads. Query and key heads are
RMS-normalised (unless the weights are None) and rotated to the row's position; values go into the
cache as they are. Row t of batch row b lands in cache row `start[b] + t`, in place when the
caches are donated; a row past the cache's end is dropped; every other cache row keeps its value.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels.mosaic import launch, row_layout
from pallas_kernels.platform import resolve_implementation
from pallas_kernels.rotary import (
    load_halves,
    normalize_halves,
    normalize_heads,
    rotate,
    rotate_halves,
    store_halves,
)
from pallas_kernels.tuning import tuned


@dataclass(frozen=True)
class Config:
    """Sizes of the kernel."""

    heads: int = 4  # a cell works on; divides the key heads, and so the query heads

    def __post_init__(self) -> None:
        if self.heads not in (2, 4, 8):
            raise ValueError(f"heads must be 2, 4 or 8, got {self.heads}")


@dataclass(frozen=True)
class Spec:
    """A shape that is served: tests, benches and tuning read these."""

    batch: int
    rows: int
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    norm: bool = True
    cache_rows: int = 2112


SPECS = (
    *(Spec(1, rows) for rows in (1, 3, 7, 8, 16)),
    *(Spec(batch, 8) for batch in (8, 32)),
    *(Spec(1, 8, heads=heads) for heads in (16, 40, 64)),
    Spec(1, 256),
    Spec(1, 8, norm=False),
    Spec(1, 8, heads=6, kv_heads=2, head_dim=64, cache_rows=520),
    Spec(1, 8, heads=8, kv_heads=4, head_dim=256),
)


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


def write_qkv(
    shape: tuple[int, ...], cache_shape: tuple[int, ...], dtype: Any, norm_eps: float, heads: int
) -> Callable[..., Any]:
    """Return the kernel: (qkv [B, T, N+2K, H], norms, cos, sin, start, cache refs) -> q.

    A cell does `heads` heads of one row. A negative `norm_eps` leaves the norm out.
    """
    batch, rows, total, width = shape
    cache_rows, kv_heads = cache_shape[1:3]
    query_heads, half = total - 2 * kv_heads, width // 2
    layout = row_layout(heads, half)

    def write(*refs: Any) -> None:
        qkv, q_norm, k_norm, cos, sin, start, k_cache, v_cache, q = refs
        token, first = lax.axis_index("token"), lax.axis_index("heads") * heads
        b, t = lax.div(token, rows), lax.rem(token, rows)
        row = start[b] + t
        values = load_halves(qkv.at[b, t, pl.ds(first, heads)], half, layout)

        def turned(weight: Any) -> Any:
            normed = values
            if norm_eps >= 0:
                normed = normalize_halves(values, weight, norm_eps, dtype, layout)
            return rotate_halves(normed, cos.at[b, t], sin.at[b, t], layout)

        def is_part(begin: int, count: int) -> Any:
            return jnp.logical_and(first >= begin, first < begin + count)

        @pl.when(first < query_heads)
        def store_query() -> None:
            store_halves(q.at[b, t, pl.ds(first, heads)], turned(q_norm), dtype)

        @pl.when(jnp.logical_and(is_part(query_heads, kv_heads), row < cache_rows))
        def store_key() -> None:
            place = pl.ds(first - query_heads, heads)
            store_halves(k_cache.at[b, row, place], turned(k_norm), dtype)

        @pl.when(jnp.logical_and(first >= query_heads + kv_heads, row < cache_rows))
        def store_value() -> None:
            place = pl.ds(first - query_heads - kv_heads, heads)
            store_halves(v_cache.at[b, row, place], values, dtype)

    return launch(
        write,
        name="qkv_write",
        grid={"token": batch * rows, "heads": total // heads},
        out_type=jax.ShapeDtypeStruct((batch, rows, query_heads, width), dtype),
    )


def shape_name(rows: int, kv_heads: int) -> str:
    """Name what sizes are tuned for: so many rows in all."""
    return f"rows {rows} kv_heads {kv_heads}"


def choose_config(rows: int, kv_heads: int) -> Config:
    """Return the tuned sizes for so many rows in all, or sizes that suit most shapes."""
    if (fields := tuned("qkv_write", shape_name(rows, kv_heads))) is not None:
        return Config(**fields)
    return Config(heads=math.gcd(kv_heads, 8))


def kernel_objection(k_cache: Float[Array, "B S K H"]) -> str | None:
    """Say why the kernel does not take these caches, or return None."""
    kv_heads, width = k_cache.shape[2:]
    if kv_heads % 2 or width not in (64, 128, 256):
        return (
            "the cache-writing kernels take an even number of key heads of width 64, 128 or 256,"
            f" got {kv_heads} of {width}"
        )
    return None


@partial(jax.jit, static_argnames=("eps", "config"))
def qkv_write_kernel(
    qkv: Float[Array, "B T P"],
    q_norm: Float[Array, " H"] | None,
    k_norm: Float[Array, " H"] | None,
    cos: Float[Array, "B T half"],
    sin: Float[Array, "B T half"],
    k_cache: Float[Array, "B S K H"],
    v_cache: Float[Array, "B S K H"],
    start: Int[Array, " B"],
    *,
    eps: float,
    config: Config,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B S K H"], Float[Array, "B S K H"]]:
    """Compute the op with one kernel that writes the caches in place."""
    batch, rows, _ = qkv.shape
    heads = qkv.reshape(batch, rows, -1, k_cache.shape[3])
    kernel = write_qkv(
        heads.shape, k_cache.shape, qkv.dtype, -1.0 if q_norm is None else eps, config.heads
    )
    norms = (cos, cos) if q_norm is None else (q_norm, k_norm)  # unread when there is no norm
    k_ref, v_ref = jax.new_ref(k_cache), jax.new_ref(v_cache)
    q = kernel(heads, *norms, cos, sin, start, k_ref, v_ref)
    return q, jax.freeze(k_ref), jax.freeze(v_ref)


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
    config: Config | None = None,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B S K H"], Float[Array, "B S K H"]]:
    """Norm, rotate and split a fused projection; return q and the caches with k and v written.

    Args:
        qkv: the projection's output, P = (N + 2K) * H wide.
        q_norm, k_norm: RMSNorm weights, both None for a network without them.
        cos, sin: float32, H/2 wide, of each row's position (attention factor included).
        k_cache, v_cache: one layer's caches; donate them to write in place.
        start: the cache row that row 0 of each batch row goes to.
        eps: of the RMSNorm.
        implementation: "auto", "pallas" or "xla". The kernel takes an even number of key heads
            of width 64, 128 or 256; for others "auto" takes the reference.
        config: sizes of the kernel; by default the tuned ones.

    Raises:
        ValueError: the shapes do not fit, or "pallas" is named and cannot run these operands or
            on this device.
    """
    kv_heads, width = k_cache.shape[2:]
    if qkv.shape[2] % width or qkv.shape[2] // width <= 2 * kv_heads:
        raise ValueError(f"a projection of shape {qkv.shape} does not fit caches {k_cache.shape}")
    if (q_norm is None) != (k_norm is None):
        raise ValueError("q_norm and k_norm must both be given or both be None")
    operands = (qkv, q_norm, k_norm, cos, sin, k_cache, v_cache, start)
    objection = kernel_objection(k_cache)
    if resolve_implementation(implementation, unsupported=objection) == "xla":
        return qkv_write_reference(*operands, eps=eps)
    config = config or choose_config(qkv.shape[0] * qkv.shape[1], kv_heads)
    return qkv_write_kernel(*operands, eps=eps, config=config)
