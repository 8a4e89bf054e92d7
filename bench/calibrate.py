"""Calibrate the confidence head: fit temperatures on some prompts, judge them on others.

Without --dataset the prompts are heads of functions in this program's own source.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from rich.console import Console
from rich.table import Table

import bench
import convert
import dspark_jax
from bench.confidence import Recorded, fit_temperatures, judge, mean_error, record, reliability
from bench.datasets import Conversation, read_conversations
from bench.output import check_chart, check_out, save_chart
from bench.pairs import EMBEDDED_DRAFT, add_model_flags, load_drafts
from bench.progress import progress_bar
from bench.serving import Generation, encode, fitting
from convert.flags import Parser, positive
from dspark_jax.calibration import save_calibration
from dspark_jax.engine import Engine
from dspark_jax.generate import tell

SOURCES = (dspark_jax, convert, bench)
HEAD_LINES = 6  # of a function


def build_parser() -> argparse.ArgumentParser:
    """The flags of `bench calibrate`."""
    parser = Parser(prog="bench calibrate", description=__doc__, allow_abbrev=False)
    add_model_flags(parser)
    add = parser.add_argument
    add("--draft", metavar="DIR", help="folder or hub id (the embedded draft)")
    add("--dataset", metavar="PATH", help="file, or folder of SPEED-Bench: its first turns")
    add("--num-prompts", type=positive, default=800, metavar="N", help="at most (800)")
    add("--skip-chat-template", action="store_true", help="prompts as they are")
    add("--output-len", type=positive, default=96, metavar="N", help="tokens at most (96)")
    add("--temperature", type=float, default=1.0, metavar="T", help="0 is greedy (1)")
    add("--seed", type=int, default=0, metavar="N", help="of shuffle and noise (0)")
    add("--max-concurrency", type=positive, default=8, metavar="C", help="rows at once (8)")
    add("--out", type=Path, metavar="FILE", help="temperatures, for load(calibration=FILE)")
    add("--chart", type=Path, metavar="FILE", help="reliability diagram, .svg or .png")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; raises ValueError for what a caller can mend."""
    options = build_parser().parse_args(arguments)
    check_chart(options.chart)
    check_out(options.out)
    halves = choose_halves(options)
    name = EMBEDDED_DRAFT if options.draft is None else options.draft
    (engine,) = load_drafts(options, [name], options.max_concurrency)
    draft = engine.config.draft_network
    if draft is None or draft.confidence == "none":
        raise ValueError(f"--draft {name} has no confidence head to calibrate; name one that has")
    fit, held_out = (record_half(engine, half, options) for half in halves)
    temperatures = fit_temperatures(fit)
    before, after = judge(held_out, None), judge(held_out, temperatures)
    figures = {
        "fitted_on_rounds": len(fit.logits),
        "before": before,
        "after": after,
        "ece_before": mean_error(before),
        "ece_after": mean_error(after),
        "reliability": reliability(held_out, temperatures),
    }
    show(temperatures, figures)
    if options.out:
        save_calibration(options.out, engine.config, temperatures, **figures)
        tell(f"wrote {options.out}")
    save_chart("reliability_chart", figures["reliability"], options.chart)
    return 0


def choose_halves(options: argparse.Namespace) -> tuple[list[Conversation], list[Conversation]]:
    """Prompts to fit on, and others to judge on: no source file gives to both."""
    if options.dataset:
        groups = [[one] for one in read_conversations(options.dataset)]
    else:
        groups = own_functions()
    Random(options.seed).shuffle(groups)
    halves = [[one for group in groups[side::2] for one in group] for side in (0, 1)]
    fit, held_out = (half[: options.num_prompts // 2] for half in halves)
    if not (fit and held_out):
        raise ValueError("two prompts are the least: one to fit on, the other to judge on")
    return fit, held_out


def own_functions() -> list[list[Conversation]]:
    """Heads of the functions and classes of this program, file by file: Python that no pair was
    trained on."""
    files = []
    for package in SOURCES:
        assert package.__file__
        for path in sorted(Path(package.__file__).parent.rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            lines = text.splitlines()
            starts = [
                node.lineno - 1
                for node in ast.walk(ast.parse(text))
                if isinstance(node, ast.FunctionDef | ast.ClassDef)
            ]
            heads = ["\n".join(lines[start : start + HEAD_LINES]) + "\n" for start in starts]
            files.append([Conversation(f"{path}:{i}", (head,)) for i, head in enumerate(heads)])
    return files


def record_half(
    engine: Engine, prompts: Sequence[Conversation], options: argparse.Namespace
) -> Recorded:
    """Rounds of the first turns of prompts; those that do not fit are left out."""
    generation = Generation(
        output_len=options.output_len,
        temperature=options.temperature,
        seed=options.seed,
        chat_template=not options.skip_chat_template,
    )
    kept = fitting(engine, prompts, generation, drop=True)
    asked = [generation.params(index) for index in range(len(kept))]
    sampled = not asked[0].greedy
    decoding = replace(engine.config.decode, sampled=sampled, ceiling=False)
    config = replace(engine.config, decode=decoding)
    ids = [encode(engine, [{"role": "user", "content": one.turns[0]}], generation) for one in kept]
    batch = min(options.max_concurrency, len(ids))
    with progress_bar("recording", len(kept)) as advance:
        return record(config, engine.params, ids, asked, engine.stop_ids, batch, advance)


def show(temperatures: Sequence[float], figures: dict[str, Any]) -> None:
    """Print the temperatures, and the figures before and after by position."""
    table = Table("pos.", "rounds", "accepted", "T", "ECE %", "AUC", "Brier")
    for before, after, temperature in zip(
        figures["before"], figures["after"], temperatures, strict=True
    ):
        changes = [
            f"{_shown(before[key], form)} > {_shown(after[key], form)}"
            for key, form in (("ece", "5.2%"), ("auc", "4.2f"), ("brier", "5.3f"))
        ]
        table.add_row(
            str(before["position"]),
            str(before["rounds"]),
            _shown(before["accepted"], "5.3f"),
            f"{temperature:.2f}",
            *changes,
        )
    console = Console()
    console.print(table)
    console.print(
        f"held-out prompts, mean over positions: ECE {100 * figures['ece_before']:.2f} % before,"
        f" {100 * figures['ece_after']:.2f} % after"
    )


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form).strip("% ")
