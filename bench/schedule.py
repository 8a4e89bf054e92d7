"""Fixed, scheduled and no drafting at several batches and acceptance curves, on true shapes.

The weights are random and the acceptance is told (see `bench.synthetic`): the times are those of
true weights, and the tokens those of a draft of known worth. The costs that the schedule goes by
are measured first, as an engine measures them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from bench.models import SIZES
from bench.modes import MODES, Bench, Program, compile_programs
from bench.output import append_lines, check_out
from bench.step import pair, rounds_alone
from bench.synthetic import CURVES
from convert.flags import Parser
from dspark_jax.costs import measure_batch
from dspark_jax.generate import tell
from dspark_jax.loading import ran_by
from dspark_jax.schedule import init_gains
from dspark_jax.state import MAX_ROUNDS
from dspark_jax.tiers import BatchCosts
from pallas_kernels.platform import default_device

WARM_CALLS = 16  # of MAX_ROUNDS rounds: until trials of drafting are as rare as they get
ROOM = 8 * MAX_ROUNDS * 2  # cache rows that a call may add
Line = dict[str, Any]


def measure_point(bench: Bench, curve: str, calls: int) -> Line:
    """Tokens a second of one mode under one curve."""
    scheduled = bench.program.mode == "scheduled"
    if scheduled:
        bench.run(CURVES[curve], WARM_CALLS, init_gains(bench.batch))
    else:
        bench.run(CURVES[curve], 1)
    seconds, counts = bench.run(CURVES[curve], calls)
    ran = calls * MAX_ROUNDS
    tokens, drafts = counts[..., 0].sum(), counts[..., 2].sum()
    return {
        "bench": "schedule",
        "mode": bench.program.mode,
        "curve": curve,
        "round_us": round(seconds / ran * 1e6, 1),
        "tokens_per_second": round(float(tokens) / seconds, 1),
        "tokens_per_row_and_round": round(float(tokens) / ran / bench.batch, 3),
        "verified_per_round": round(float(drafts) / ran + bench.batch, 1),
        "drafted_rounds": round(float((counts[..., 2].sum(1) > 0).mean()), 3),
    }


def compare(lines: Sequence[Line]) -> None:
    """Add to every scheduled line its rate over the best of the other modes."""
    for line in lines:
        if line["mode"] != "scheduled":
            continue
        beside = [
            one["tokens_per_second"]
            for one in lines
            if one["mode"] != "scheduled"
            and (one["shape"], one["curve"]) == (line["shape"], line["curve"])
        ]
        if beside:
            line["of_best"] = round(line["tokens_per_second"] / max(beside), 4)


def measure_programs(
    programs: dict[str, Program], costs: BatchCosts, options: argparse.Namespace
) -> list[Line]:
    """Every curve in every mode at a batch; one mode's state at a time."""
    shared = {
        "shape": {"model": options.model, "batch": costs.batch, "cached": options.cached},
        "sampled": options.sampled,
        "plain_us": round(costs.plain, 1),
        "tiers_us": _rounded(costs),
        "device": default_device().device_kind,
        "jax": jax.__version__,
    }
    lines: list[Line] = []
    for mode, program in programs.items():
        bench = Bench(program, costs.batch, options.cached)
        curves = options.curve if mode != "none" else options.curve[:1]
        made = [measure_point(bench, curve, options.calls) for curve in curves]
        if mode == "none":  # no draft, no curve
            made = [made[0] | {"curve": curve} for curve in options.curve]
        implementation = ran_by(program.config)
        lines += [shared | {"implementation": implementation} | line for line in made]
        del bench
    compare(lines)
    return lines


def _rounded(costs: BatchCosts) -> dict[str, float]:
    return {str(n): round(time, 1) for n, time in zip(costs.tokens, costs.rounds, strict=True)}


def show(lines: Sequence[Line]) -> None:
    """One row a batch and curve."""
    columns = ("batch", "curve", *(f"{mode} tok/s" for mode in MODES))
    table = Table(*columns, "verified", "drafted", "of the best")
    points = dict.fromkeys((line["shape"]["batch"], line["curve"]) for line in lines)
    for batch, curve in points:
        found = {
            line["mode"]: line
            for line in lines
            if (line["shape"]["batch"], line["curve"]) == (batch, curve)
        }
        rates = [
            f"{found[mode]['tokens_per_second']:.0f}" if mode in found else "" for mode in MODES
        ]
        chosen = found["scheduled"]
        table.add_row(
            str(batch),
            curve,
            *rates,
            f"{chosen['verified_per_round']:.1f}",
            f"{100 * chosen['drafted_rounds']:.0f} %",
            f"{chosen['of_best']:.3f}" if "of_best" in chosen else "",
        )
    Console().print(table)


def build_parser() -> argparse.ArgumentParser:
    """The flags of `bench schedule`."""
    parser = Parser(prog="bench schedule", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--model", default="embedded", choices=("embedded", *SIZES))
    add("--batch", type=int, nargs="+", default=[1, 8], metavar="B")
    add("--cached", type=int, default=1000, metavar="ROWS", help="of every row (1000)")
    add("--curve", nargs="+", choices=(*CURVES,), default=list(CURVES), help="only these (all)")
    add("--mode", nargs="+", choices=MODES, default=list(MODES), help="beside scheduled (all)")
    add("--calls", type=int, default=8, metavar="N", help=f"of {MAX_ROUNDS} rounds a point (8)")
    add("--dtype", choices=("bfloat16", "float32"))
    add("--sampled", action="store_true", help="the tier of any temperature")
    add("--implementation", choices=("auto", "pallas", "xla"), default="auto")
    add("--out", type=Path, metavar="FILE", help="append JSON Lines here")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; raises ValueError for what a caller can mend."""
    options = build_parser().parse_args(arguments)
    if min(*options.batch, options.cached, options.calls) < 1:
        raise ValueError("--batch, --cached and --calls must be positive")
    check_out(options.out)
    length = options.cached + ROOM
    config, params = pair(options.model, options.dtype, max_length=length)
    config = rounds_alone(config, options.implementation, options.sampled, length)
    modes = [mode for mode in MODES if mode in {*options.mode, "scheduled"}]
    lines: list[Line] = []
    for batch in dict.fromkeys(options.batch):  # one after the other: what is done is on record
        begin = time.perf_counter()
        measured = measure_batch(config, params, batch, context=options.cached)
        times = _rounded(measured)
        tell(f"batch {batch}: plain {measured.plain:.0f} us, by verified tokens {times}")
        programs = compile_programs(config, params, measured.pruned(), modes)
        tell(f"batch {batch}: measured and compiled in {time.perf_counter() - begin:.0f} s")
        found = measure_programs(programs, measured, options)
        append_lines(found, options.out)
        lines += found
    show(lines)
    return 0
