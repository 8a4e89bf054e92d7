"""Time of plain decode, draft step, verify step and round on weights of true shapes.

The weights are random and made on the device: nothing is downloaded, and the time of a step does
not depend on what the weights say. The floor is the bytes that a step must read over the read
bandwidth measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from bench.models import SIZES, Dtype, filled_state, model_config, plain, random_params, tree_bytes
from bench.timing import read_bandwidth
from dspark_jax import decode
from dspark_jax.cache import cache_bytes
from dspark_jax.config import ModelConfig
from dspark_jax.loading import load, ran_by
from dspark_jax.state import MAX_ROUNDS, DecodeState, Params
from pallas_kernels.platform import default_device, resolve_implementation

REPEATS = 5
Step = Callable[[DecodeState], DecodeState]


def step_bytes(config: ModelConfig, params: Params, batch: int, cached: int) -> dict[str, int]:
    """Bytes that each step must read once: weights, Markov matrix per slot, cache rows."""
    itemsize = jnp.dtype(config.dtype).itemsize
    target = tree_bytes(params["target"])
    if not config.target.tied:  # an embedding is read a few rows at a time, a head whole
        target -= tree_bytes(params["target"]["embed_tokens"])
    rows = cache_bytes(config.target.layers, batch, cached, itemsize)
    found = {"plain_decode": target + rows, "verify_step": target + rows}
    draft_network = config.draft_network
    if draft_network:
        weights = params["draft"]
        heads = weights.get("markov_head", {})
        w2 = tree_bytes(heads.get("markov_w2", {}))
        draft = tree_bytes(weights) - tree_bytes(heads.get("markov_w1", {})) - w2
        draft -= tree_bytes(weights.get("embed_tokens", {}))
        if not draft_network.own_head:
            draft += config.target.vocab_size * draft_network.layers.hidden_size * itemsize
        rows = cache_bytes(draft_network.layers, batch, cached, itemsize)
        found["draft_step"] = draft + w2 * config.decode.num_drafts + rows
        found["round"] = found["draft_step"] + found["verify_step"]
    return found


def wall_us(step: Step, state: DecodeState, calls: int) -> tuple[float, DecodeState]:
    """Median microseconds a call over chains of `calls` calls, each fed the last one's state."""
    state = step(state)
    jax.block_until_ready(state.cached)
    times = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        for _ in range(calls):
            state = step(state)
        jax.block_until_ready(state.cached)
        times.append((time.perf_counter() - begin) / calls * 1e6)
    return median(times), state


def time_steps(
    config: ModelConfig, params: Params, batch: int, cached: int, calls: int = 10
) -> dict[str, float]:
    """Microseconds of each step; `round` is measured inside one call of many rounds."""
    bare = plain(config)
    alone = {"target": params["target"]}
    rounds = jnp.int32(MAX_ROUNDS)
    state = filled_state(bare, batch, cached)
    found = {}
    found["plain_decode"], state = wall_us(
        lambda s: decode.decode_rounds(bare, alone, s, rounds)[0], state, 2
    )
    found["plain_decode"] /= MAX_ROUNDS
    del state
    if config.draft is None:
        return found
    state = filled_state(config, batch, cached)
    found["draft_step"], state = wall_us(
        lambda s: decode.draft_step(config, params, s)[0], state, calls
    )
    state, proposal = decode.draft_step(config, params, state)
    found["verify_step"], state = wall_us(
        lambda s: decode.verify_step(config, params, s, proposal)[0], state, calls
    )
    found["round"], state = wall_us(
        lambda s: decode.decode_rounds(config, params, s, rounds)[0], state, 2
    )
    found["round"] /= MAX_ROUNDS
    return found


def records(
    name: str, config: ModelConfig, params: Params, bandwidth: float, shape: tuple[int, int]
) -> list[dict[str, Any]]:
    """One record a step at a shape (batch, cached)."""
    batch, cached = shape
    moved = step_bytes(config, params, batch, cached)
    lines = []
    for step, time_us in time_steps(config, params, batch, cached).items():
        floor_us = moved[step] / bandwidth * 1e6
        lines.append(
            {
                "bench": "step",
                "name": step,
                "implementation": ran_by(config),
                "sampled": config.decode.sampled,
                "shape": {"model": name, "batch": batch, "cached": cached},
                "time_us": round(time_us, 1),
                "bytes": moved[step],
                "floor_us": round(floor_us, 1),
                "percent_of_floor": round(100 * floor_us / time_us, 1),
                "error": None,
                "read_bandwidth": round(bandwidth),
                "dtype": config.dtype,
                "device": default_device().device_kind,
                "jax": jax.__version__,
            }
        )
    return lines


def show(lines: list[dict[str, Any]]) -> None:
    table = Table("step", "implementation", "batch", "cached", "ms", "floor ms", "% of floor")
    for line in lines:
        shape = line["shape"]
        table.add_row(
            line["name"],
            line["implementation"],
            str(shape["batch"]),
            str(shape["cached"]),
            f"{line['time_us'] / 1e3:.3f}",
            f"{line['floor_us'] / 1e3:.3f}",
            f"{line['percent_of_floor']:.1f}",
        )
    Console().print(table)


def pair(name: str, dtype: Dtype | None, **decoding: Any) -> tuple[ModelConfig, Params]:
    """A random pair of published shapes, or the embedded one."""
    if name == "embedded":
        engine = load(dtype=dtype, max_length=decoding["max_length"], max_batch=1)
        return engine.config, engine.params
    config = model_config(name, dtype=dtype or "bfloat16", **decoding)
    return config, random_params(config)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench step", description=__doc__)
    parser.add_argument("--model", default="embedded", choices=("embedded", *SIZES))
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--cached", type=int, nargs="+", default=[1000])
    parser.add_argument("--dtype", choices=("bfloat16", "float32"))
    parser.add_argument("--sampled", action="store_true", help="the tier of any temperature")
    parser.add_argument("--implementation", nargs="+", default=["auto"])
    parser.add_argument("--out", type=Path, help="append JSON Lines here")
    options = parser.parse_args(arguments)
    if min(*options.batch, *options.cached) < 1:
        raise ValueError("--batch and --cached must be positive")
    bandwidth = read_bandwidth() if default_device().platform == "gpu" else read_bandwidth(2**26)
    lines = []
    config, params = pair(options.model, options.dtype, max_length=max(options.cached) + 1024)
    for wanted in options.implementation:
        resolve_implementation(wanted)
        switches = {"implementation": wanted, "sampled": options.sampled}
        for batch in options.batch:
            for cached in options.cached:
                room = {"max_length": cached + 16 * MAX_ROUNDS * 8}
                fitted = replace(config, decode=replace(config.decode, **switches, **room))
                lines += records(options.model, fitted, params, bandwidth, (batch, cached))
    if options.out:
        with options.out.open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
    show(lines)
    return 0
