"""A projection by a weight that lies [out, in], as checkpoints have it."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def matmul_precision(dtype: Any) -> lax.Precision:
    """float32 means highest precision on every platform (a GPU or TPU would round otherwise)."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT


def project(
    x: Float[Array, "*rows d"], weight: Float[Array, "n d"], out_dtype: Any = None
) -> Float[Array, "*rows n"]:
    """x @ weight.T, accumulated in float32 and returned in `out_dtype` (x's when None)."""
    dot = partial(
        jnp.einsum,
        precision=matmul_precision(x.dtype),
        preferred_element_type=out_dtype or x.dtype,
    )

    def weight_first(x: Array, weight: Array) -> Array:
        return jnp.moveaxis(dot("nd,...d->n...", weight, x), 0, -1)

    def rows_first(x: Array, weight: Array) -> Array:
        return dot("...d,nd->...n", x, weight)

    # The same sums in the same order. On a CPU a few rows against a [out, in] weight run twice
    # as fast with the weight on the left.
    return lax.platform_dependent(x, weight, cpu=weight_first, default=rows_first)
