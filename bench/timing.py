"""Device time of a jitted call: durations of its kernels from a profile, over rotating operands.

Operands rotate over more bytes than the chip's cache holds, so that it does not answer. On a
platform without kernel records the host's clock is read instead.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp

from bench.trace import record_events

ROTATED_BYTES = 150_000_000  # an H200 caches 60 MB


@dataclass(frozen=True)
class Timing:
    """Microseconds of device time a call, in all and by kernel."""

    time_us: float
    kernels: dict[str, float]  # kernel -> microseconds a call
    calls: float  # kernels a call


def sets_needed(bytes_a_set: int) -> int:
    """Return how many operand sets rotate: at least two."""
    return max(2, -(-ROTATED_BYTES // bytes_a_set))


def measure(
    call: Callable[[Any], Any], sets: Sequence[Any], *, in_place: bool = False, repeats: int = 40
) -> Timing:
    """Time `call(operands)` over the sets in turn; the median of each kernel is what counts.

    With `in_place` a call returns the operands to go on with, as donated buffers require.
    """
    sets = list(sets)

    def run(times: int) -> None:
        result = None
        for i in range(times):
            result = call(sets[i % len(sets)])
            if in_place:
                sets[i % len(sets)] = result
        jax.block_until_ready(result)

    run(len(sets) + 1)
    if jax.devices()[0].platform != "gpu":
        begin = time.perf_counter()
        run(repeats)
        return Timing((time.perf_counter() - begin) / repeats * 1e6, {}, 0.0)
    durations: dict[str, list[float]] = defaultdict(list)
    for event in record_events(lambda: run(repeats)):
        durations[event.name].append(event.time_us)
    kernels = {name: median(runs) * len(runs) / repeats for name, runs in durations.items()}
    calls = sum(len(runs) for runs in durations.values()) / repeats
    return Timing(sum(kernels.values()), kernels, calls)


def read_bandwidth(size: int = 2**31) -> float:
    """Measure the bytes a second that a sum over `size` bytes reads."""
    ones = jnp.ones(size // 2, jnp.bfloat16)
    timing = measure(jax.jit(lambda x: x.sum(dtype=jnp.float32)), [ones], repeats=10)
    return size / timing.time_us * 1e6


def matmul_peak(side: int, dtype: str) -> float:
    """Measure the multiplications and additions a second of a product of square matrices."""
    operands = [jnp.ones((side, side), dtype) for _ in range(2)]
    timing = measure(jax.jit(lambda pair: pair[0] @ pair[1]), [operands], repeats=10)
    return 2 * side**3 / timing.time_us * 1e6
