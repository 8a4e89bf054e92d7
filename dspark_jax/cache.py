"""Allocate the caches and hold the capacity rule: no write ever reaches past an allocation."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from dspark_jax.config import LayersConfig, ModelConfig
from dspark_jax.sharding import DATA, axis_size, per_device, spec, state_specs
from dspark_jax.state import KVCache

ROW_TILE = 8  # cache rows come in multiples of what the kernels' copy engine moves


def capacity(config: ModelConfig) -> int:
    """Cache rows a slot: the last round may start at max_length, the last chunk may be padded.

    Rows past the end are dropped, and those of a block attend to one another: the overhang of a
    block is allocated, and that of a chunk, so that no write ever depends on the rule.
    """
    decode = config.decode
    trained = config.draft_network.block_size if config.draft_network else 0
    block = max(decode.step_rows, trained)
    padded = -(-decode.max_length // decode.prefill_chunk) * decode.prefill_chunk
    rows = max(decode.max_length + block, padded)
    return -(-rows // ROW_TILE) * ROW_TILE


def allocate(layers: LayersConfig, batch: int, rows: int, dtype: str) -> KVCache:
    """A cache of zeros: garbage rows must be finite."""
    shape = (batch, rows, layers.num_kv_heads, layers.head_dim)

    def tensors() -> tuple[Array, ...]:
        return tuple(jnp.zeros(shape, dtype) for _ in range(layers.num_layers))

    return KVCache(k=tensors(), v=tensors())


def cache_bytes(layers: LayersConfig, batch: int, rows: int, itemsize: int) -> int:
    """Bytes of `allocate`'s result."""
    row = layers.num_kv_heads * layers.head_dim * itemsize
    return 2 * layers.num_layers * batch * rows * row


def read_slot(cache: Any, slot: Int[Array, ""]) -> Any:
    """One slot of a KVCache, or of any tree of [B, ...] arrays, as a batch of one.

    On a mesh that splits slots it is a batch of one row a part: the slot where it lies, and some
    other slot of each other part, so that no cache moves.
    """

    def read(cache: Any, slot: Array) -> Any:
        place, _ = _local_place(cache, slot)
        return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, place, 1), cache)

    specs = state_specs(cache)
    return per_device(read, (specs, spec("")), specs)(cache, slot)


def write_slot(cache: Any, part: Any, slot: Int[Array, ""]) -> Any:
    """Put a slot read by `read_slot` back; other slots stay as they are."""

    def write(cache: Any, part: Any, slot: Array) -> Any:
        place, held = _local_place(cache, slot)

        def put(x: Array, y: Array) -> Array:
            if held is not None:
                y = jnp.where(held, y, jax.lax.dynamic_slice_in_dim(x, place, 1))
            return jax.lax.dynamic_update_slice_in_dim(x, y, place, 0)

        return jax.tree.map(put, cache, part)

    specs = state_specs(cache)
    return per_device(write, (specs, specs, spec("")), specs)(cache, part, slot)


def _local_place(cache: Any, slot: Int[Array, ""]) -> tuple[Array, Array | None]:
    """Where a slot lies in this device's part, and whether it does (None: it always does)."""
    if axis_size(DATA) == 1 or not (leaves := jax.tree.leaves(cache)):
        return slot, None
    count = leaves[0].shape[0]
    offset = slot - jax.lax.axis_index(DATA) * count
    place = jnp.clip(offset, 0, count - 1)
    return place, place == offset


def take_slot(rows: Array, slot: Int[Array, ""], batch: int) -> Array:
    """The row that was computed for a slot, of those that `read_slot` made, as a batch of one."""
    parts = axis_size(DATA)
    if parts == 1:
        return rows
    held = jnp.arange(parts) == slot // (batch // parts)
    held = held.reshape(-1, *[1] * (rows.ndim - 1))
    return jnp.sum(jnp.where(held, rows, 0), axis=0, keepdims=True)
