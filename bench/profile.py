"""Where a round's device time goes, by kind of kernel and by stage, beside plain decoding.

Reads a trace of the JAX profiler. On a GPU the profiler turns command buffers off, so the gaps are
wider than they are without it; XLA_FLAGS=--xla_enable_command_buffers_during_profiling=true keeps
them on. Kernel times are right either way.
"""

from __future__ import annotations

import argparse
import os
import re
import time
from collections import defaultdict
from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from bench.kernel_classes import CLASSES, CONTAINERS, OTHER, STAGES, Kernels
from bench.loops import Loop, compile_loops
from bench.mesh import add_mesh_flags, mesh_of, shape_of
from bench.models import SIZES, filled_state
from bench.output import append_lines, check_chart, check_out, save_chart
from bench.step import PAPER_LENGTH, ROOM, Line, pair, rounds_alone
from bench.trace import Event, gaps_us, record_events
from convert.flags import Parser
from dspark_jax.costs import rewind
from dspark_jax.generate import tell
from dspark_jax.loading import ran_by
from dspark_jax.state import MAX_ROUNDS
from pallas_kernels.platform import default_device, resolve_implementation

COLUMNS = {"plain_decode": "plain", "round": "DSpark"}
# Kernels that the article's profile of the PyTorch evaluator counts, all its tokens together.
ARTICLE_LAUNCHES = 20_000
ARTICLE_MATMUL = 0.663  # its share of matmuls; it expects 0.8 of a graph with fused kernels
LISTED = 25


def summarize(events: Sequence[Event], kernels: Kernels, rounds: int) -> dict[str, Any]:
    """Microseconds a round by class and stage, kernels a round, and the longest kernels."""
    times: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    listed: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    leaves = []
    stage = OTHER
    for event in events:
        one = kernels.find(event.name, event.hlo_op)
        if one is not None and one.opcode in CONTAINERS:
            continue
        kind = kernels.class_of(event.name, one)
        found = kernels.stage_of(one)
        if found != OTHER or kind == "copies" or (one is not None and one.op_name):
            stage = found  # else a kernel of this package: it follows what it works on
        times["classes"][kind] += event.time_us
        times["stages"][stage] += event.time_us
        shape = re.sub(r"\{.*?\}", "", one.shape) if one and one.shape[0] != "(" else ""
        name = re.sub(r"[._]\d+$", "", event.hlo_op or event.name)
        listed[f"{name} {shape}".strip(), kind, stage].append(event.time_us)
        leaves.append(event)
    times["classes"]["gaps"] = gaps_us(leaves)
    total = sum(times["classes"].values())
    longest = sorted(listed.items(), key=lambda item: -sum(item[1]))[:LISTED]
    return {
        "time_us": round(total / rounds, 1),
        "classes": {name: round(times["classes"][name] / rounds, 1) for name in CLASSES},
        "shares": {name: round(times["classes"][name] / total, 4) for name in CLASSES},
        "stages": {name: round(times["stages"][name] / rounds, 1) for name in (*STAGES, OTHER)},
        "kernels": round(len(leaves) / rounds, 1),
        "longest": [
            {
                "kernel": name,
                "class": kind,
                "stage": stage,
                "time_us": round(sum(spans) / rounds, 2),
                "runs": round(len(spans) / rounds, 2),
            }
            for (name, kind, stage), spans in longest
        ],
    }


def profile(loop: Loop, batch: int, cached: int, rounds: int) -> dict[str, Any]:
    """Trace one call of `rounds` rounds, after a first one whose wall time is the warm-up."""
    count = np.int32(rounds)
    state = rewind(filled_state(loop.config, batch, cached, loop.mesh), cached)
    jax.block_until_ready(state)
    begin = time.perf_counter()
    state, _ = loop.run(state, count)
    jax.block_until_ready(state)
    warm_up = time.perf_counter() - begin
    state = rewind(state, cached)
    jax.block_until_ready(state)
    events = record_events(lambda: loop.run(state, count))
    found = summarize(events, Kernels(loop.program), rounds)
    return found | {"warmup_us": round(warm_up * 1e6, 1), "launches": loop.program.round_launches()}


def show(lines: Sequence[Line], length: float) -> None:
    """Print shares by class and stage in one column a program, then the longest kernels."""
    console = Console()
    table = Table("device time a round", *(COLUMNS[line["name"]] for line in lines))
    for name in CLASSES:
        table.add_row(name, *(_part(line, line["classes"][name]) for line in lines))
    table.add_section()
    for name in (*STAGES, OTHER):
        table.add_row(name, *(_part(line, line["stages"][name]) for line in lines))
    table.add_row("warmup (first call)", *(f"{line['warmup_us'] / 1e3:.1f} ms" for line in lines))
    table.add_section()
    table.add_row("in all, ms", *(f"{line['time_us'] / 1e3:.3f}" for line in lines))
    table.add_row("kernels a round", *(f"{line['kernels']:.0f}" for line in lines))
    per_token = (line["kernels_per_token"] for line in lines)
    table.add_row(f"a token (acceptance length {length:g})", *(f"{n:.1f}" for n in per_token))
    console.print(table)
    console.print(
        f"The article counts about {ARTICLE_LAUNCHES:,} launches in all for the PyTorch evaluator,"
        f" {100 * ARTICLE_MATMUL:.0f} % of its time in matmuls, and expects 80 % and more of fused"
        " kernels in a CUDA graph.",
        highlight=False,
    )
    for line in lines:
        longest = Table(f"longest kernels, {COLUMNS[line['name']]}", "class", "stage", "us", "runs")
        for one in line["longest"]:
            figures = (f"{one['time_us']:.1f}", f"{one['runs']:g}")
            longest.add_row(one["kernel"], one["class"], one["stage"], *figures)
        console.print(longest)


def _part(line: Line, time_us: float) -> str:
    return f"{time_us / 1e3:7.3f} ms {100 * time_us / line['time_us']:5.1f} %"


def build_parser() -> argparse.ArgumentParser:
    """The flags of `bench profile`."""
    parser = Parser(prog="bench profile", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--model", default="embedded", choices=("embedded", *SIZES))
    add("--batch", type=int, default=1, metavar="B")
    add("--cached", type=int, default=1000, metavar="ROWS")
    add("--rounds", type=int, default=8, metavar="N", help=f"traced, at most {MAX_ROUNDS} (8)")
    add("--dtype", choices=("bfloat16", "float32"))
    add("--sampled", action="store_true", help="the tier of any temperature")
    add("--implementation", default="auto")
    add(
        "--acceptance",
        type=float,
        default=PAPER_LENGTH,
        metavar="LENGTH",
        help=f"acceptance length of the launches a token ({PAPER_LENGTH})",
    )
    add_mesh_flags(parser)
    add("--out", type=Path, metavar="FILE", help="append JSON Lines here")
    add("--chart", type=Path, metavar="FILE", help="shares as bars, .svg or .png")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; raises ValueError for what a caller can mend."""
    options = build_parser().parse_args(arguments)
    if min(options.batch, options.cached) < 1 or not 1 <= options.acceptance < inf:
        raise ValueError("--batch, --cached and --acceptance must be at least 1")
    if not 1 <= options.rounds <= MAX_ROUNDS:
        raise ValueError(f"--rounds is within 1 and {MAX_ROUNDS}, got {options.rounds}")
    check_chart(options.chart)
    check_out(options.out)
    resolve_implementation(options.implementation)
    length = options.cached + ROOM
    mesh = mesh_of(options, [options.batch])
    config, params = pair(options.model, options.dtype, mesh, max_length=length)
    config = rounds_alone(config, options.implementation, options.sampled, length)
    lines = []
    for loop in compile_loops(config, params, options.batch, COLUMNS, mesh):
        tell(f"tracing {options.rounds} rounds of {loop.name}")
        found = profile(loop, options.batch, options.cached, options.rounds)
        emitted = options.batch * (options.acceptance if loop.name == "round" else 1)
        lines.append(
            {
                "bench": "profile",
                "name": loop.name,
                "implementation": ran_by(loop.config),
                "sampled": options.sampled,
                "shape": shape_of(options.model, options.batch, options.cached, mesh),
                **found,
                "kernels_per_token": round(found["kernels"] / emitted, 1),
                "rounds": options.rounds,
                "xla_flags": os.environ.get("XLA_FLAGS", ""),
                "dtype": loop.config.dtype,
                "device": default_device().device_kind,
                "jax": jax.__version__,
            }
        )
        append_lines(lines[-1:], options.out)
    show(lines, options.acceptance)
    save_chart("profile_chart", lines, options.chart)
    return 0
