"""What happens to a head between the projection and the cache: RMSNorm and rotary position.

First on arrays, then the same inside a kernel, where a head is a pair of halves in registers.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from pallas_kernels.mosaic import load

Halves = tuple[Any, Any]


def normalize_heads(
    x: Float[Array, "*rows H"], weight: Float[Array, "*#rows H"] | None, eps: float
) -> Float[Array, "*rows H"]:
    """RMSNorm each head: compute in float32, cast back, then scale; `weight=None` leaves it out.

    Source: `Qwen3RMSNorm` of transformers.
    """
    if weight is None:
        return x
    wide = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return weight * (wide * scale).astype(x.dtype)


def rotate(
    x: Float[Array, "B T *heads H"], cos: Float[Array, "B T half"], sin: Float[Array, "B T half"]
) -> Float[Array, "B T *heads H"]:
    """Rotate each head's halves against each other by the row's angles, in float32.

    The rotate-half convention of transformers: element i pairs with element i + H/2.
    """
    shape = (*cos.shape[:2], *(1,) * (x.ndim - 3), cos.shape[2])
    cos, sin = cos.reshape(shape), sin.reshape(shape)
    low, high = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)
    return rotated.astype(x.dtype)


def half_slices(half: int) -> tuple[Any, Any]:
    """Return the slices of a head's two halves."""
    return pl.ds(0, half), pl.ds(half, half)


def load_halves(heads: Any, half: int, layout: Any) -> Halves:
    """Load the halves of `[R, H]` heads from device memory, as float32."""
    low, high = (load(heads.at[:, part], layout).astype(jnp.float32) for part in half_slices(half))
    return low, high


def store_halves(heads: Any, halves: Halves, dtype: Any) -> None:
    """Store the halves of `[R, H]` heads to device memory."""
    for value, part in zip(halves, half_slices(halves[0].shape[1]), strict=True):
        heads[:, part] = value.astype(dtype)


def _spread(row: Any, like: Any, layout: Any) -> Any:
    return lax.broadcast_in_dim(load(row, layout.reduce(0)), like.shape, [1])


def normalize_halves(halves: Halves, weight: Any, eps: float, dtype: Any, layout: Any) -> Halves:
    """`normalize_heads` inside a kernel; `weight` is a reference to H elements."""
    low, high = halves
    half = low.shape[1]
    square = (low * low + high * high).sum(axis=1)
    scale = lax.broadcast_in_dim(lax.rsqrt(square / (2 * half) + eps), low.shape, [0])

    def scaled(value: Any, part: Any) -> Any:
        rounded = (value * scale).astype(dtype).astype(jnp.float32)
        factor = _spread(weight.at[part], value, layout).astype(jnp.float32)
        return (factor * rounded).astype(dtype).astype(jnp.float32)

    first, second = half_slices(half)
    return scaled(low, first), scaled(high, second)


def rotate_halves(halves: Halves, cos: Any, sin: Any, layout: Any) -> Halves:
    """`rotate` inside a kernel; `cos` and `sin` are references to the row's H/2 elements."""
    low, high = halves
    cos, sin = _spread(cos, low, layout), _spread(sin, low, layout)
    return low * cos - high * sin, high * cos + low * sin
