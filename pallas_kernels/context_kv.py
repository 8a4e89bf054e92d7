"""Put the context rows of all draft layers into their caches, from one fused projection.

A row of `kv` holds, for layer 0, K key heads and then K value heads, then the same for layer 1,
and so on. Key heads are RMS-normalised with their layer's weights (unless they are None) and
rotated to the row's position. Row t of batch row b lands in cache row `start[b] + t` of every
layer if `t < count[b]`; a row past the cache's end is dropped; every other cache row keeps its
value. Rows of `kv` at or past `count[b]` may hold any finite numbers and change nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
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
from pallas_kernels.qkv_write import Config, kernel_objection, shape_name
from pallas_kernels.rotary import (
    load_halves,
    normalize_halves,
    normalize_heads,
    rotate,
    rotate_halves,
    store_halves,
)
from pallas_kernels.tuning import tuned

Caches = Sequence[Float[Array, "B S K H"]]


@dataclass(frozen=True)
class Spec:
    """A shape that is served: tests, benches and tuning read these."""

    batch: int
    rows: int
    layers: int = 5
    kv_heads: int = 8
    head_dim: int = 128
    norm: bool = True
    cache_rows: int = 2112


SPECS = (
    *(Spec(1, rows) for rows in (1, 3, 7, 8, 16)),
    *(Spec(batch, 8) for batch in (8, 32)),
    Spec(1, 256),
    Spec(1, 8, norm=False),
    Spec(1, 8, layers=2, kv_heads=2, head_dim=64, cache_rows=520),
    Spec(1, 8, layers=2, kv_heads=4, head_dim=256),
)


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


def write_context(
    shape: tuple[int, ...], cache_shape: tuple[int, ...], dtype: Any, norm_eps: float, heads: int
) -> Callable[..., None]:
    """Return the kernel: (kv [B, T, L*2*K, H], norms, cos, sin, start, count, cache refs).

    A cell does `heads` heads of one row and layer. A negative `norm_eps` leaves the norm out.
    """
    batch, rows, total, width = shape
    cache_rows, kv_heads = cache_shape[1:3]
    layers, half = total // (2 * kv_heads), width // 2
    layout = row_layout(heads, half)

    def write(
        kv: Any, norms: Any, cos: Any, sin: Any, start: Any, count: Any, *caches: Any
    ) -> None:
        token, first = lax.axis_index("token"), lax.axis_index("heads") * heads
        b, t = lax.div(token, rows), lax.rem(token, rows)
        row = start[b] + t
        layer, inner = lax.div(first, 2 * kv_heads), lax.rem(first, 2 * kv_heads)

        def store(values: Any, targets: Any, head: Any) -> None:
            for i, cache in enumerate(targets):

                @pl.when(layer == i)
                def store_layer(cache: Any = cache) -> None:
                    store_halves(cache.at[b, row, pl.ds(head, heads)], values, dtype)

        @pl.when(jnp.logical_and(t < count[b], row < cache_rows))
        def write_row() -> None:
            values = load_halves(kv.at[b, t, pl.ds(first, heads)], half, layout)

            @pl.when(inner < kv_heads)
            def write_key() -> None:
                normed = values
                if norm_eps >= 0:
                    normed = normalize_halves(values, norms.at[layer], norm_eps, dtype, layout)
                turned = rotate_halves(normed, cos.at[b, t], sin.at[b, t], layout)
                store(turned, caches[:layers], inner)

            @pl.when(inner >= kv_heads)
            def write_value() -> None:
                store(values, caches[layers : 2 * layers], inner - kv_heads)

    return launch(write, name="context_kv", grid={"token": batch * rows, "heads": total // heads})


def choose_config(rows: int, kv_heads: int) -> Config:
    """Return the tuned sizes for so many rows in all, or sizes that suit most shapes."""
    if (fields := tuned("context_kv", shape_name(rows, kv_heads))) is not None:
        return Config(**fields)
    return Config(heads=math.gcd(kv_heads, 8))


@partial(jax.jit, static_argnames=("eps", "config"))
def context_kv_kernel(
    kv: Float[Array, "B T P"],
    k_norms: Float[Array, "L H"] | None,
    cos: Float[Array, "B T half"],
    sin: Float[Array, "B T half"],
    k_caches: Caches,
    v_caches: Caches,
    start: Int[Array, " B"],
    count: Int[Array, " B"],
    *,
    eps: float,
    config: Config,
) -> tuple[list[Float[Array, "B S K H"]], list[Float[Array, "B S K H"]]]:
    """Compute the op with one kernel that writes the caches in place."""
    batch, rows, _ = kv.shape
    heads = kv.reshape(batch, rows, -1, k_caches[0].shape[3])
    kernel = write_context(
        heads.shape, k_caches[0].shape, kv.dtype, -1.0 if k_norms is None else eps, config.heads
    )
    norms = cos[0] if k_norms is None else k_norms  # unread when there is no norm
    refs = [jax.new_ref(cache) for cache in (*k_caches, *v_caches)]
    kernel(heads, norms, cos, sin, start, count, *refs)
    written = [jax.freeze(ref) for ref in refs]
    return written[: len(k_caches)], written[len(k_caches) :]


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
    config: Config | None = None,
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
        implementation: "auto", "pallas" or "xla". The kernel takes an even number of key heads
            of width 64, 128 or 256; for others "auto" takes the reference.
        config: sizes of the kernel; by default the tuned ones.

    Raises:
        ValueError: the shapes do not fit, or "pallas" is named and cannot run these operands or
            on this device.
    """
    kv_heads, width = k_caches[0].shape[2:]
    if len(k_caches) != len(v_caches) or kv.shape[2] != len(k_caches) * 2 * kv_heads * width:
        raise ValueError(
            f"a projection of shape {kv.shape} does not fit {len(k_caches)} key and"
            f" {len(v_caches)} value caches {k_caches[0].shape}"
        )
    operands = (kv, k_norms, cos, sin, k_caches, v_caches, start, count)
    objection = kernel_objection(k_caches[0])
    if resolve_implementation(implementation, unsupported=objection) == "xla":
        return context_kv_reference(*operands, eps=eps)
    config = config or choose_config(kv.shape[0] * kv.shape[1], kv_heads)
    return context_kv_kernel(*operands, eps=eps, config=config)
