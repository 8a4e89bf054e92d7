"""Allocate the caches and hold the capacity rule: no write ever reaches past an allocation."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from dspark_jax.config import LayersConfig, ModelConfig
from dspark_jax.state import KVCache

ROW_TILE = 8  # cache rows come in multiples of what the kernels' copy engine moves


def capacity(config: ModelConfig) -> int:
    """Cache rows a slot: the last round may start at max_length, the last chunk may be padded.

    `dynamic_update_slice` moves an overflowing start back in silence and would overwrite true
    rows, so both overhangs are allocated.
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
    """One slot of a KVCache, or of any tree of [B, ...] arrays, as a batch of one."""
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, slot, 1), cache)


def write_slot(cache: Any, part: Any, slot: Int[Array, ""]) -> Any:
    """Put a slot read by `read_slot` back."""
    return jax.tree.map(
        lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y, slot, 0), cache, part
    )
