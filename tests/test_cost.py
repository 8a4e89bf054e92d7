"""The cost of a round follows the cached rows and not the allocation."""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.numpy as jnp

from dspark_jax import decode
from tests.pairs import DEMO, load_pair

CACHED, REPEATS = 200, 60


class Rounds:
    """Rounds of one allocation, each started from the same number of cached rows."""

    def __init__(self, max_length: int) -> None:
        self.config, self.params = load_pair(
            DEMO, max_length=max_length, prefill_chunk=64, sampled=False
        )
        state = decode.init_state(self.config, 1)
        keys = iter(jax.random.split(jax.random.key(0), 64))
        caches = jax.tree.map(
            lambda x: jax.random.normal(next(keys), x.shape), (state.target, state.draft)
        )
        self.state = state.replace(target=caches[0], draft=caches[1])
        self.cached = jnp.array([CACHED], jnp.int32)
        self.fixed: dict[str, Any] = {
            "limit": jnp.array([max_length], jnp.int32),
            "done": jnp.array([False]),
        }

    def seconds(self) -> float:
        state = self.state.replace(
            cached=jnp.copy(self.cached), **jax.tree.map(jnp.copy, self.fixed)
        )
        jax.block_until_ready(state)
        begin = time.perf_counter()
        self.state, _ = decode.decode_round(self.config, self.params, state)
        jax.block_until_ready(self.state)
        return time.perf_counter() - begin


def test_a_round_of_200_rows_costs_the_same_in_a_cache_of_4096() -> None:
    small, large = Rounds(512), Rounds(4096)
    times = [(small.seconds(), large.seconds()) for _ in range(REPEATS)]
    fastest = [min(column) for column in zip(*times[5:], strict=True)]
    assert fastest[1] <= 1.15 * fastest[0], f"{fastest[0]:.6f} s and {fastest[1]:.6f} s"
