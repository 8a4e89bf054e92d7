"""Each op x SPECS x implementation: time, bytes, percent of the floor, error against float64.

One JSON line a measurement, and a table. The floor is the bytes that the op must move over the
read bandwidth measured in the same run.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bench.kernel_cases import Case, cases
from bench.output import check_out
from bench.timing import Timing, measure, read_bandwidth, sets_needed
from convert.flags import Parser
from pallas_kernels.platform import default_device, runs_kernels

OPS = ("block_attention", "qkv_write", "context_kv", "markov_walk", "fused_matmul")


def operand_bytes(operands: Any) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(operands))


def operand_sets(case: Case) -> list[Any]:
    """Draw as many operand sets as rotate past the chip's cache."""
    sets = [case.draw()]
    return sets + [case.draw() for _ in range(sets_needed(operand_bytes(sets[0])) - 1)]


def take(case: Case, *, repeats: int = 40) -> tuple[Timing, float]:
    """Measure a case and its error."""
    first = case.draw()
    kept = jax.tree.map(np.asarray, first) if case.in_place else first
    error = case.check(kept, case.call(first))
    sets = operand_sets(case)
    return measure(case.call, sets, in_place=case.in_place, repeats=repeats), error


def record(
    implementation: str, case: Case, timing: Timing, error: float, bandwidth: float
) -> dict[str, Any]:
    """Make the JSON record of a measurement."""
    floor_us = case.moved / bandwidth * 1e6
    return {
        "bench": "kernels",
        "name": case.op,
        "implementation": implementation,
        "shape": case.shape,
        "time_us": round(timing.time_us, 2),
        "kernels": {name: round(us, 2) for name, us in timing.kernels.items()},
        "bytes": case.moved,
        "floor_us": round(floor_us, 2),
        "percent_of_floor": round(100 * floor_us / timing.time_us, 1),
        "error": error,
        "read_bandwidth": round(bandwidth),
        "device": default_device().device_kind,
        "jax": jax.__version__,
        **case.extra,
    }


def build_parser() -> argparse.ArgumentParser:
    """The flags of `bench kernels`."""
    parser = Parser(prog="bench kernels", description=__doc__)
    add = parser.add_argument
    add("--op", action="append", choices=OPS, help="only this op (repeatable)")
    add("--implementation", action="append", choices=("pallas", "xla"))
    add(
        "--match",
        action="append",
        help="only shapes whose line holds this text, as 'batch=1 rows=8' (repeatable)",
    )
    add("--out", type=Path, help="append JSON Lines here")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the command; raises ValueError for what a caller can mend."""
    options = build_parser().parse_args(arguments)
    check_out(options.out)
    implementations = tuple(options.implementation or ())
    if not implementations:
        implementations = ("pallas", "xla") if runs_kernels(default_device()) else ("xla",)
    bandwidth = read_bandwidth()
    print(f"{default_device().device_kind}: reads {bandwidth / 1e12:.2f} TB/s", flush=True)
    for implementation, case in cases(tuple(options.op or OPS), implementations):
        shape = " ".join(f"{k}={v}" for k, v in case.shape.items())
        if options.match and not any(f"{text} " in f"{shape} " for text in options.match):
            continue
        line = record(implementation, case, *take(case), bandwidth)
        if options.out:
            with options.out.open("a") as file:
                file.write(json.dumps(line) + "\n")
        print(
            f"{line['name']:16} {implementation:7} {line['time_us']:9.2f} us"
            f" {line['percent_of_floor']:6.1f} %  error {line['error']:.1e}  {shape}",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
