"""The rows of a verify pass side by side without the ones that are not verified.

What costs by the row (matmuls, norms) runs on packed rows [M, D]. Attention and cache writes keep
the shape [B, T]: there, a row that is not verified is a copy of a packed one, and what it writes
lies past the row's length, where a cache holds garbage anyway.
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int, Shaped


@struct.dataclass
class Packing:
    """`rows[m]` is the flat place b * T + t of packed row m; `places[b, t]` the way back."""

    rows: Int[Array, " M"]
    places: Int[Array, "B T"]

    def pack(self, x: Shaped[Array, "B T *d"]) -> Shaped[Array, M * d]:
        return x.reshape(-1, *x.shape[2:])[self.rows]

    def unpack(self, x: Shaped[Array, M * d]) -> Shaped[Array, "B T *d"]:
        return x[self.places]


class Whole:
    """Every row is verified: nothing is packed."""

    def pack(self, x: Array) -> Array:
        return x

    def unpack(self, x: Array) -> Array:
        return x


WHOLE = Whole()


def pack_rows(verified: Bool[Array, "B T"], size: int) -> Packing:
    """Pack the verified rows, of which there are at most `size`, in the order of the batch.

    Places that are left over repeat the first row of the batch.
    """
    flat = verified.ravel()
    places = jnp.where(flat, jnp.cumsum(flat) - 1, size)
    rows = jnp.zeros(size, jnp.int32).at[places].set(jnp.arange(flat.size), mode="drop")
    return Packing(rows, jnp.where(verified, places.reshape(verified.shape), 0))
