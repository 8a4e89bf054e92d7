"""Programs of the three modes (no drafting, fixed, scheduled), compiled once for all curves."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from bench.models import filled_state, plain
from bench.synthetic import Acceptance, Curve, accepted_by
from dspark_jax import decode
from dspark_jax.compiler import compiler_options
from dspark_jax.config import ModelConfig
from dspark_jax.costs import rewind
from dspark_jax.state import MAX_ROUNDS, DecodeState, Gains, Params
from dspark_jax.tiers import BatchCosts

MODES = ("none", "fixed", "scheduled")


@dataclass
class Program:
    """Rounds of one mode: run(state, (bounds, call)) -> (state, counts)."""

    mode: str
    config: ModelConfig
    run: Callable[..., tuple[DecodeState, Array]]


def lower(
    mode: str, config: ModelConfig, params: Params, costs: BatchCosts
) -> tuple[str, ModelConfig, Params, Any]:
    """Trace one mode's rounds at the batch of `costs`, which the schedule goes by."""
    if mode == "none":
        config, params = plain(config), {"target": params["target"]}
    if mode == "scheduled":
        config = replace(config, decode=replace(config.decode, costs=(costs,)))

    def run(
        params: Params, state: DecodeState, told: tuple[Array, Array]
    ) -> tuple[DecodeState, Array]:
        with accepted_by(Acceptance(*told)):
            state, out = decode.decode_rounds.__wrapped__(
                config, params, state, jnp.int32(MAX_ROUNDS)
            )
        return state, out.counts

    state = jax.eval_shape(partial(decode.init_state, config, costs.batch))
    entry = jax.jit(run, donate_argnames=("state",))
    lowered = entry.lower(params, state, (Curve(0, 0).bounds(costs.batch), jnp.int32(0)))
    return mode, config, params, lowered


def compile_programs(
    config: ModelConfig, params: Params, costs: BatchCosts, modes: Sequence[str]
) -> dict[str, Program]:
    """Every mode at the batch of `costs`, compiled side by side."""
    traced = [lower(mode, config, params, costs) for mode in modes]
    options = compiler_options()
    with ThreadPoolExecutor(len(modes)) as pool:  # XLA compiles outside the interpreter's lock
        compiled = list(pool.map(lambda one: one[-1].compile(options), traced))
    return {
        mode: Program(mode, own, partial(program, weights))
        for (mode, own, weights, _), program in zip(traced, compiled, strict=True)
    }


@dataclass
class Bench:
    """A batch of one program's rows, and calls that are timed."""

    program: Program
    batch: int
    cached: int

    def __post_init__(self) -> None:
        self.state = filled_state(self.program.config, self.batch, self.cached)

    def run(self, curve: Curve, calls: int, gains: Gains | None = None) -> tuple[float, np.ndarray]:
        """Seconds and counts [calls, B, rounds, 4] of calls, each from the same rows.

        As the engine does, each is sent before the last one has ended. The clock starts as a first
        call ends, so that no sending is waited for.
        """
        bounds = curve.bounds(self.batch)
        if gains is not None:
            self.state = replace(self.state, gains=jax.tree.map(jnp.copy, gains))

        def send(call: int) -> Array:
            told = (bounds, jnp.int32(call))
            self.state, counts = self.program.run(rewind(self.state, self.cached), told)
            return counts

        first, counts = send(0), [send(1)]
        jax.block_until_ready(first)
        begin = time.perf_counter()
        counts += [send(call) for call in range(2, calls + 1)]
        jax.block_until_ready(self.state)
        return time.perf_counter() - begin, np.stack(jax.device_get(counts))
