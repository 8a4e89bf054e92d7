"""Rows of a state as requests come and go: put to rest, moved to a batch of another size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from dspark_jax.config import ModelConfig
from dspark_jax.decode import entry
from dspark_jax.state import DecodeState, KVCache


@entry
def release(config: ModelConfig, state: DecodeState, slots: Bool[Array, " B"]) -> DecodeState:
    """Finish the rows of some slots and empty them: attention pays for the longest row."""
    return replace(
        state,
        cached=jnp.where(slots, 0, state.cached),
        context_len=jnp.where(slots, 0, state.context_len),
        done=state.done | slots,
    )


def move_rows(state: DecodeState, rows: Sequence[int]) -> DecodeState:
    """A state of len(rows) slots; slot i holds what slot rows[i] held. The old one is consumed.

    Caches move array by array, so that no more than one of them exists twice.
    """
    places = np.asarray(rows, np.int32)
    small = _placed_take(replace(state, target=KVCache((), ()), draft=()), places)
    target, draft = jax.tree.map(lambda x: _move(x, places), (state.target, state.draft))
    return replace(small, target=target, draft=draft)


def _move(cache: Array, places: Int[np.ndarray, " B"]) -> Array:
    moved = _placed_take(cache, places)
    cache.delete()
    return moved


def _placed_take(rows: Any, places: Int[np.ndarray, " B"]) -> Any:
    """On a mesh each array is split as it was."""
    split = jax.tree.map(lambda x: x.sharding, rows)
    return jax.jit(_take, out_shardings=split)(rows, places)


def _take(rows: Any, places: Int[Array, " B"]) -> Any:
    return jax.tree.map(lambda x: x[places] if x.ndim else x, rows)
