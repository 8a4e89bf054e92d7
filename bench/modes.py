"""Programs of the three modes (no drafting, fixed, scheduled), compiled once for all curves."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from bench.models import filled_state, plain
from bench.synthetic import Acceptance, Curve, accepted_by
from dspark_jax import decode, rounds
from dspark_jax.compiler import compiler_options
from dspark_jax.config import ModelConfig
from dspark_jax.costs import rewind
from dspark_jax.state import MAX_ROUNDS, DecodeState, Gains, Params
from dspark_jax.tiers import BatchCosts, verified_tiers

MODES = ("none", "fixed", "scheduled")


@dataclass(frozen=True)
class TracedCosts:
    """`BatchCosts` whose numbers are operands: one program serves all of them."""

    tokens: tuple[int, ...]
    plain: Array
    rounds: Array
    curve: Array

    def envelope(self) -> Array:
        return self.curve


@dataclass
class Program:
    """Rounds of one mode: run(state, (bounds, call), costs) -> (state, counts)."""

    mode: str
    config: ModelConfig
    run: Callable[..., tuple[DecodeState, Array]]


def lower(
    mode: str, config: ModelConfig, params: Params, batch: int
) -> tuple[str, ModelConfig, Params, Any]:
    """Trace one mode's rounds at a batch."""
    sizes = verified_tiers(batch, config.decode.step_rows)
    if mode == "none":
        config, params = plain(config), {"target": params["target"]}
    if mode == "scheduled":  # the numbers are handed in
        costs = (BatchCosts(batch, 1.0, sizes, (1.0,) * len(sizes)),)
        config = replace(config, decode=replace(config.decode, costs=costs))

    def run(
        params: Params, state: DecodeState, told: tuple[Array, Array], costs: tuple[Array, ...]
    ) -> tuple[DecodeState, Array]:
        numbers = TracedCosts(sizes, *costs)
        measured = patch.object(rounds, "batch_costs", lambda *_: numbers)
        with accepted_by(Acceptance(*told)), measured:
            state, out = decode.decode_rounds.__wrapped__(
                config, params, state, jnp.int32(MAX_ROUNDS)
            )
        return state, out.counts

    state = jax.eval_shape(partial(decode.init_state, config, batch))
    numbers = (jnp.float32(1), jnp.ones(len(sizes)), jnp.ones(sizes[-1] + 1))
    entry = jax.jit(run, donate_argnames=("state",))
    lowered = entry.lower(params, state, (Curve(0, 0).bounds(batch), jnp.int32(0)), numbers)
    return mode, config, params, lowered


def compile_programs(
    config: ModelConfig, params: Params, batch: int, modes: Sequence[str]
) -> dict[str, Program]:
    """Every mode at a batch, compiled side by side."""
    traced = [lower(mode, config, params, batch) for mode in modes]
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

    def run(
        self, curve: Curve, costs: tuple[Any, ...], calls: int, gains: Gains | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Seconds [calls] and counts [calls, B, rounds, 4] of calls, each from the same rows."""
        bounds, counts, seconds = curve.bounds(self.batch), [], []
        operands = tuple(jnp.asarray(x, jnp.float32) for x in costs)
        if gains is not None:
            self.state = replace(self.state, gains=jax.tree.map(jnp.copy, gains))
        for call in range(calls):
            self.state = jax.block_until_ready(rewind(self.state, self.cached))
            begin = time.perf_counter()
            self.state, found = self.program.run(self.state, (bounds, jnp.int32(call)), operands)
            jax.block_until_ready(found)
            seconds.append(time.perf_counter() - begin)
            counts.append(np.asarray(found))
        return np.array(seconds), np.stack(counts)
