"""Rows of a state as requests come and go: put to rest, moved to a batch of another size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
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
    leaves, tree = jax.tree.flatten(rows)
    taken = _take(tuple(x.sharding for x in leaves))(leaves, places)
    return jax.tree.unflatten(tree, taken)


@lru_cache(maxsize=256)
def _take(split: tuple[Sharding, ...]) -> Callable[..., list[Array]]:
    """Take rows of arrays that lie so, and stay so; kept, for each jit compiles for itself."""

    def take(arrays: list[Array], places: Int[Array, " B"]) -> list[Array]:
        return [x[places] if x.ndim else x for x in arrays]

    return jax.jit(take, out_shardings=list(split))
