"""This package's plain step and round beside PyTorch's, alternating in one run.

Peers: transformers' `generate` with a static cache (compiled on a GPU), and a DSpark loop in eager
PyTorch. All run random weights of the same shapes, batch 1, greedily. Ratios are taken within a
repetition, so that a drift of the machine's speed cancels.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from bench.loops import compile_loops, time_step
from bench.models import SIZES, filled_state
from bench.output import append_lines, check_out
from bench.step import PAPER_LENGTH, ROOM, Line, pair
from bench.torch_rules import share_memory
from convert.flags import Parser, positive
from dspark_jax.config import ModelConfig
from dspark_jax.generate import tell
from dspark_jax.loading import ran_by
from dspark_jax.state import Params
from pallas_kernels.platform import default_device

OURS = ("plain_decode", "round")
PEERS = ("torch_decode", "torch_round")
TITLES = {
    "plain_decode": "plain decoding, this package",
    "round": "DSpark round, this package",
    "torch_decode": "plain decoding, transformers (static cache, compiled on a GPU)",
    "torch_round": "DSpark round, eager PyTorch",
}
STEP_ROWS = 8  # that a round of seven drafts may add
Timer = Callable[[], float]  # microseconds of a step


def our_timers(config: ModelConfig, params: Params, cached: int) -> dict[str, Timer]:
    """Time this package's two loops."""
    states: dict[str, Any] = {}

    def timer(loop: Any) -> float:
        state = states.pop(loop.name, None) or filled_state(loop.config, 1, cached)
        time_us, states[loop.name] = time_step(loop, state, cached)
        return time_us

    def bound(loop: Any) -> Timer:
        return lambda: timer(loop)

    return {loop.name: bound(loop) for loop in compile_loops(config, params, 1, OURS)}


def peer_timers(
    config: ModelConfig, cached: int, names: Sequence[str], tokens: int, rounds: int
) -> dict[str, Timer]:
    """Time PyTorch's; raises ValueError for another architecture."""
    from bench import torch_peers as peers  # torch takes long to import

    assert config.draft_network is not None  # every pair of `bench step` has one
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    target = peers.build_target(config, cached + ROOM, device)
    prompt = peers.random_prompt(config, cached, device)
    timers: dict[str, Timer] = {}
    if "torch_decode" in names:
        timers["torch_decode"] = lambda: peers.decode_us(target, prompt, tokens)
    if "torch_round" in names:
        draft = peers.build_draft(config.draft_network, config.dtype, device)
        timers["torch_round"] = lambda: peers.round_us(peers.Decoder(target, draft, prompt), rounds)
    return timers


def alternate(timers: dict[str, Timer], repeats: int) -> dict[str, list[float]]:
    """Times of each, one a repetition, after a first that warms up."""
    found: dict[str, list[float]] = {name: [] for name in timers}
    for repetition in range(repeats + 1):
        for name, timer in timers.items():
            time_us = timer()
            if repetition:
                found[name].append(time_us)
            else:
                tell(f"{name}: warm, {time_us / 1e3:.3f} ms")
    return found


def ratios(times: dict[str, list[float]], length: float) -> dict[str, list[float]]:
    """Factors of this package's round at an acceptance length: [least, median, most]."""
    over = {
        "over_plain_decode": ("plain_decode", length),
        "over_torch_decode": ("torch_decode", length),
        "over_torch_round": ("torch_round", 1.0),  # both emit the same tokens a round
    }
    found = {}
    for name, (other, tokens) in over.items():
        if other in times:
            pairs = zip(times[other], times["round"], strict=True)
            each = [tokens * theirs / ours for theirs, ours in pairs]
            found[name] = [round(x, 3) for x in (min(each), median(each), max(each))]
    return found


def show(lines: Sequence[Line], length: float) -> None:
    """Print the times and the ratios with their spread."""
    table = Table("what", "ms", "from - to")
    for line in lines:
        low, high = min(line["times_us"]) / 1e3, max(line["times_us"]) / 1e3
        spread = f"{low:.3f} - {high:.3f}"
        table.add_row(TITLES[line["name"]], f"{line['time_us'] / 1e3:.3f}", spread)
    console = Console()
    console.print(table)
    names = {
        "over_plain_decode": f"plain decoding, at acceptance length {length:g}",
        "over_torch_decode": f"transformers' decoding, at acceptance length {length:g}",
        "over_torch_round": "the eager PyTorch round",
    }
    for name, (low, middle, high) in lines[1]["ratios"].items():
        text = f"{middle:.2f} x {names[name]} ({low:.2f} - {high:.2f})"
        console.print(text, highlight=False)


def build_parser() -> argparse.ArgumentParser:
    """The flags of `bench peers`."""
    parser = Parser(prog="bench peers", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--model", default="embedded", choices=("embedded", *SIZES))
    add("--cached", type=positive, default=1000, metavar="ROWS")
    add("--dtype", choices=("bfloat16", "float32"))
    add("--peer", nargs="+", choices=PEERS, default=list(PEERS), help="only these (both)")
    add("--repeats", type=positive, default=3, metavar="N", help="alternations (3)")
    add("--tokens", type=positive, default=32, metavar="N", help="of transformers, a time (32)")
    add("--rounds", type=positive, default=8, metavar="N", help="of eager PyTorch, a time (8)")
    add("--acceptance", type=float, default=PAPER_LENGTH, metavar="LENGTH")
    add("--out", type=Path, metavar="FILE", help="append JSON Lines here")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; raises ValueError for what a caller can mend."""
    options = build_parser().parse_args(arguments)
    if not 1 <= options.acceptance < inf:
        raise ValueError("--acceptance: an acceptance length is at least 1")
    for flag, rows in (("--tokens", options.tokens), ("--rounds", options.rounds * STEP_ROWS)):
        if rows > ROOM // 2:  # the rest is for what runs before the clock does
            raise ValueError(f"{flag} would add {rows} cache rows, at most {ROOM // 2} fit")
    check_out(options.out)
    if not find_spec("torch"):
        raise ValueError("PyTorch is not installed beside this package: pip install torch")
    share_memory()
    length = options.cached + ROOM
    config, params = pair(options.model, options.dtype, max_length=length)
    decode = replace(config.decode, max_length=length, prefill_chunk=1, sampled=False)
    config = replace(config, decode=decode)
    peers = peer_timers(config, options.cached, options.peer, options.tokens, options.rounds)
    times = alternate(our_timers(config, params, options.cached) | peers, options.repeats)
    lines = [
        {
            "bench": "peers",
            "name": name,
            "implementation": ran_by(config) if name in OURS else "torch",
            "shape": {"model": options.model, "batch": 1, "cached": options.cached},
            "time_us": round(median(found), 1),
            "times_us": [round(x, 1) for x in found],
            "dtype": config.dtype,
            "device": default_device().device_kind,
            "jax": jax.__version__,
        }
        for name, found in times.items()
    ]
    lines[1] |= {"acceptance": options.acceptance, "ratios": ratios(times, options.acceptance)}
    append_lines(lines, options.out)
    show(lines, options.acceptance)
    return 0
