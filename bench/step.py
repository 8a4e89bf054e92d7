"""Time of plain decode, draft step, verify step and round on weights of true shapes.

The weights are random and made on the device: nothing is downloaded, and the time of a step does
not depend on what the weights say. Every step is repeated inside one jit. The floor is the bytes
that a step must read over the read bandwidth measured in the same run.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from rich.console import Console
from rich.table import Table

from bench.loops import CALLS, ENTRIES, Loop, compile_loops, idle_shares, inspect, time_step
from bench.mesh import add_mesh_flags, mesh_of, shape_of
from bench.models import SIZES, Dtype, filled_state, model_config, random_params, tree_bytes
from bench.output import append_lines, check_chart, check_out, save_chart
from bench.timing import read_bandwidth
from convert.flags import Parser
from dspark_jax.cache import cache_bytes
from dspark_jax.config import ModelConfig
from dspark_jax.generate import tell
from dspark_jax.loading import load, ran_by
from dspark_jax.sharding import DATA, TENSOR, check_divisible, device_share
from dspark_jax.state import MAX_ROUNDS, DecodeState, Params
from pallas_kernels.platform import default_device, resolve_implementation

PAPER_LENGTH = 4.81  # macro mean acceptance length of the DSpark paper's Qwen3-8B pair
ROOM = 8 * CALLS * MAX_ROUNDS  # cache rows that a chain of calls may add
Line = dict[str, Any]


def step_bytes(
    config: ModelConfig, params: Params, batch: int, cached: int, mesh: Mesh | None = None
) -> dict[str, int]:
    """Bytes that each device must read once a step: weights, Markov matrix per slot, cache rows."""
    head_rows = config.target.vocab_size // (mesh.shape[TENSOR] if mesh else 1)
    config, batch = device_share(config, batch, mesh)
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
            draft += head_rows * draft_network.layers.hidden_size * itemsize
        rows = cache_bytes(draft_network.layers, batch, cached, itemsize)
        found["draft_step"] = draft + w2 * config.decode.num_drafts + rows
        found["round"] = found["draft_step"] + found["verify_step"]
    return found


def measure(
    name: str, loops: Sequence[Loop], params: Params, shape: tuple[int, Sequence[int]], rate: float
) -> list[Line]:
    """Records of every loop at a batch and each number of cached rows; `rate` is bytes a second.

    A state serves all loops of its kind, one kind at a time: two caches need not fit. On a mesh
    the batch is that of all devices, and bytes and floor are of each.
    """
    batch, lengths = shape
    lines = []
    for own in dict.fromkeys(loop.config for loop in loops):
        state = filled_state(own, batch, lengths[0], loops[0].mesh)
        for loop in (one for one in loops if one.config == own):
            seen = inspect(loop, params, state)
            for cached in lengths:
                line, state = _record(name, loop, params, state, (batch, cached, rate))
                lines.append(line | seen if loop.name in ("plain_decode", "round") else line)
                tell(f"{loop.name} batch {batch} cached {cached}: {line['time_us'] / 1e3:.3f} ms")
        del state
    return lines


def _record(
    name: str,
    loop: Loop,
    params: Params,
    state: DecodeState,
    point: tuple[int, int, float],
) -> tuple[Line, DecodeState]:
    batch, cached, rate = point
    moved = step_bytes(loop.config, params, batch, cached, loop.mesh)[loop.name]
    time_us, state = time_step(loop, state, cached)
    floor_us = moved / rate * 1e6
    line = {
        "bench": "step",
        "name": loop.name,
        "implementation": ran_by(loop.config),
        "sampled": loop.config.decode.sampled,
        "shape": shape_of(name, batch, cached, loop.mesh),
        "time_us": round(time_us, 1),
        "bytes": moved,
        "floor_us": round(floor_us, 1),
        "percent_of_floor": round(100 * floor_us / time_us, 1),
        "error": None,
        "read_bandwidth": round(rate),
        "memory_bytes": (default_device().memory_stats() or {}).get("bytes_in_use"),
        "dtype": loop.config.dtype,
        "device": default_device().device_kind,
        "jax": jax.__version__,
    }
    if loop.name == "round":
        line["idle"], state = idle_shares(loop, state, cached)
    return line, state


def derive(lines: Sequence[Line], lengths: Sequence[float]) -> None:
    """Add to every round what follows from the measurements beside it.

    `tokens_per_second` at acceptance lengths, `break_even` and `speedup` against plain decoding
    at the same shape, and `cache_growth`: how much longer it takes than with the fewest cached
    rows, over the time of reading the rows added.
    """
    for line in lines:
        if line["name"] != "round":
            continue
        shape, time_us = line["shape"], line["time_us"]
        line["tokens_per_second"] = {
            f"{n:g}": round(shape["batch"] * n / time_us * 1e6, 1) for n in lengths
        }
        plain = _beside(line, lines, "plain_decode", shape["cached"])
        if plain:
            ratio = time_us / plain["time_us"]
            line["break_even"] = round(ratio, 3)
            line["speedup"] = {f"{n:g}": round(n / ratio, 3) for n in lengths}
            line["plain_tokens_per_second"] = round(shape["batch"] / plain["time_us"] * 1e6, 1)
        fewest = min(one["shape"]["cached"] for one in lines)
        first = _beside(line, lines, "round", fewest)
        if first and first is not line:
            reading_us = (line["bytes"] - first["bytes"]) / line["read_bandwidth"] * 1e6
            line["cache_growth"] = round((time_us - first["time_us"]) / reading_us, 3)


def _beside(line: Line, lines: Sequence[Line], name: str, cached: int) -> Line | None:
    """The record of a step at the shape and implementation of another record."""
    wanted = {"name": name, "shape": {**line["shape"], "cached": cached}}
    wanted |= {key: line[key] for key in ("implementation", "sampled", "dtype")}
    return next((one for one in lines if wanted.items() <= one.items()), None)


def show(lines: Sequence[Line]) -> None:
    """Print the times, and below them what follows for each round."""
    console = Console()
    table = Table("step", "implementation", "batch", "cached", "ms", "floor ms", "% of floor")
    for line in lines:
        shape = line["shape"]
        times = (f"{line[key] / 1e3:.3f}" for key in ("time_us", "floor_us"))
        place = (line["implementation"], str(shape["batch"]), str(shape["cached"]))
        table.add_row(line["name"], *place, *times, f"{line['percent_of_floor']:.1f}")
    console.print(table)
    for line in lines:
        if "tokens_per_second" in line:
            console.print(describe(line), highlight=False)


def describe(line: Line) -> str:
    """What a round's figures say, in a sentence."""
    shape = line["shape"]
    parts = [
        f"{rate:.0f} tokens/s at acceptance length {length}"
        + (f" ({line['speedup'][length]:.2f} x plain decoding)" if "speedup" in line else "")
        for length, rate in line["tokens_per_second"].items()
    ]
    if "break_even" in line:
        parts.append(f"pays above {line['break_even']:.2f}")
    if "cache_growth" in line:
        parts.append(f"grows by {line['cache_growth']:.2f} x the time of reading the added rows")
    idle = ", ".join(f"{100 * share:.1f} % ({name})" for name, share in line["idle"].items())
    parts.append(f"idle {idle}")
    parts.append(f"{line['launches']} launches and {line['copies']} cache or weight copies a round")
    return (
        f"{line['implementation']}, batch {shape['batch']}, {shape['cached']} cached rows: "
        + "; ".join(parts)
    )


def pair(
    name: str, dtype: Dtype | None, mesh: Mesh | None = None, **decoding: Any
) -> tuple[ModelConfig, Params]:
    """A random pair of published shapes, or the embedded one."""
    if name == "embedded":
        slots = mesh.shape[DATA] if mesh else 1
        engine = load(dtype=dtype, max_length=decoding["max_length"], max_batch=slots, mesh=mesh)
        return engine.config, engine.params
    config = model_config(name, dtype=dtype or "bfloat16", **decoding)
    if mesh:
        check_divisible(config, mesh.shape[DATA], mesh)
    return config, random_params(config, mesh)


def rounds_alone(
    config: ModelConfig,
    implementation: Literal["auto", "pallas", "xla"],
    sampled: bool,
    length: int,
) -> ModelConfig:
    """`config` with caches of `length` rows, in which no prompt is run."""
    decode = replace(
        config.decode,
        implementation=implementation,
        sampled=sampled,
        max_length=length,
        prefill_chunk=1,
    )
    return replace(config, decode=decode)


def build_parser() -> argparse.ArgumentParser:
    """The flags of `bench step`."""
    parser = Parser(prog="bench step", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--model", default="embedded", choices=("embedded", *SIZES))
    add("--batch", type=int, nargs="+", default=[1], metavar="B")
    add("--cached", type=int, nargs="+", default=[1000], metavar="ROWS")
    add("--step", nargs="+", choices=(*ENTRIES,), default=list(ENTRIES), help="only these (all)")
    add("--dtype", choices=("bfloat16", "float32"))
    add("--sampled", action="store_true", help="the tier of any temperature")
    add("--implementation", nargs="+", default=["auto"])
    add(
        "--acceptance",
        type=float,
        nargs="+",
        default=[PAPER_LENGTH],
        metavar="LENGTH",
        help=f"acceptance lengths of the derived figures ({PAPER_LENGTH}, the paper's)",
    )
    add_mesh_flags(parser)
    add("--out", type=Path, metavar="FILE", help="append JSON Lines here")
    add("--chart", type=Path, metavar="FILE", help="times against the floor, .svg or .png")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; raises ValueError for what a caller can mend."""
    options = build_parser().parse_args(arguments)
    if min(*options.batch, *options.cached) < 1:
        raise ValueError("--batch and --cached must be positive")
    mesh = mesh_of(options, options.batch)
    if not all(0 < length < inf for length in options.acceptance):
        raise ValueError("--acceptance: an acceptance length is above 0")
    check_chart(options.chart)
    check_out(options.out)
    for wanted in options.implementation:
        resolve_implementation(wanted)
    rate = read_bandwidth() if default_device().platform == "gpu" else read_bandwidth(2**26)
    tell(f"{default_device().device_kind}: reads {rate / 1e12:.3f} TB/s")
    length = max(options.cached) + ROOM
    config, params = pair(options.model, options.dtype, mesh, max_length=length)
    lines = []
    for wanted in options.implementation:
        fitted = rounds_alone(config, wanted, options.sampled, length)
        for batch in options.batch:
            loops = compile_loops(fitted, params, batch, options.step, mesh)
            found = measure(options.model, loops, params, (batch, options.cached), rate)
            derive(found, options.acceptance)
            append_lines(found, options.out)
            lines += found
    show(lines)
    save_chart("step_chart", lines, options.chart)
    return 0
