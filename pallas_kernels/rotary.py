"""What happens to a head between the projection and the cache: RMSNorm and rotary position."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


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
