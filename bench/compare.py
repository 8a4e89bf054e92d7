"""Drafts of one target side by side, on the same prompts: time, acceptance, ceiling and floor.

Only the first turn of a prompt is answered. Drafts take turns at every batch of prompts, in an
order that rotates, so that a drift of the machine's speed cancels. Baseline of the speed-up is
`none`, or the first draft without it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from rich.console import Console

from bench.ceiling import UNKNOWN
from bench.datasets import Conversation
from bench.entries import EngineEntry, Entry
from bench.figures import total_seconds
from bench.output import check_outputs, write_outputs
from bench.pairs import (
    EMBEDDED_DRAFT,
    NONE,
    add_model_flags,
    add_prompt_flags,
    brings_draft,
    load_drafts,
    short_name,
    variant,
)
from bench.progress import progress_bar
from bench.records import Measurement, Run, environment
from bench.serving import Generation, fitting
from bench.speed import generation_of, select_prompts
from bench.tables import ceiling_table, comparison_table, position_table, run_table, verdict_line
from bench.torch_rules import check_torch, share_memory
from convert.flags import Parser, positive
from dspark_jax.config import DraftConfig
from dspark_jax.engine import Engine
from dspark_jax.generate import tell
from dspark_jax.state import MAX_ROUNDS

PROMPTS = (
    'def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n',
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "import json\n\ndef read_config(path):\n    with open(path) as f:\n",
)


def build_parser() -> argparse.ArgumentParser:
    """The flags of `bench compare`."""
    parser = Parser(prog="bench compare", description=__doc__, allow_abbrev=False)
    add_model_flags(parser)
    add = parser.add_argument
    add(
        "--draft",
        action="append",
        metavar="DIR",
        help="folder, hub id, ngram or none; repeatable (the embedded draft and none)",
    )
    add(
        "--num-speculative-tokens",
        type=positive,
        nargs="+",
        metavar="N",
        help="drafts a round; several make a sweep",
    )
    add(
        "--confidence-threshold",
        type=float,
        nargs="+",
        metavar="C",
        help="cut drafts below it, where the draft has a confidence head; several make a sweep",
    )
    add_prompt_flags(parser)
    add("--output-len", type=positive, default=64, metavar="N", help="tokens at most (64)")
    add("--max-concurrency", type=positive, default=1, metavar="C", help="requests at a time (1)")
    add("--repeats", type=positive, default=3, metavar="N", help="times that all is measured (3)")
    add(
        "--torch",
        action="store_true",
        help="PyTorch peers as well: transformers, and an eager DSpark loop; greedy, one request",
    )
    add("--no-ceiling", action="store_true", help="leave out possible acceptance")
    add(
        "--replay-rounds",
        type=int,
        default=32,
        metavar="N",
        help="rounds of a request repeated over a fresh prefill; 0 is none (32)",
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; raises ValueError for what a caller can mend."""
    options = build_parser().parse_args(arguments)
    if options.replay_rounds < 0:
        raise ValueError(f"--replay-rounds cannot be negative: {options.replay_rounds}")
    check_outputs(options)
    if options.torch:
        check_torch(options)
        share_memory()
    chosen = _prompts(options)
    generation = generation_of(options, MAX_ROUNDS)
    names = options.draft or [*([EMBEDDED_DRAFT] if brings_draft(options) else []), NONE]
    if len(set(names)) < len(names):
        raise ValueError(f"a --draft is named twice: {', '.join(names)}")
    engines = load_drafts(options, names, options.max_concurrency)
    _check_sweep(options, engines)
    entries = [
        entry
        for name, engine in zip(names, engines, strict=True)
        for entry in _sweep(name, engine, options)
    ]
    kept = fitting(engines[0], chosen, generation, options.drop_long)
    if len(kept) < len(chosen):
        tell(f"note: {len(chosen) - len(kept)} prompts above --max-length are left out")
    found = environment(engines[0])
    every: list[Entry] = [*entries]
    if options.torch:
        from bench.torch_entries import torch_entries, torch_environment  # takes long to import

        every += torch_entries(options, names, engines)
        found["torch"] = torch_environment()
    measure(every, kept, generation, options.max_concurrency, options.repeats)
    if not options.no_ceiling:
        for entry in entries:
            entry.probe_ceiling(kept, generation, options.max_concurrency, options.replay_rounds)
    runs = [entry.run(generation, options.max_concurrency) for entry in every]
    measurement = Measurement("compare", vars(options), found, runs)
    write_outputs(measurement, options)
    show(measurement)
    return 0


def measure(
    entries: Sequence[Entry],
    conversations: Sequence[Conversation],
    generation: Generation,
    concurrency: int,
    repeats: int,
) -> None:
    """Answer the first turns with every entry, in turns, `repeats` times."""
    for entry in entries:
        entry.warm_up(conversations, generation, concurrency)
    starts = range(0, len(conversations), concurrency)
    with progress_bar("comparing", repeats * len(starts) * len(entries)) as advance:
        for repetition in range(repeats):
            for entry in entries:
                entry.seconds.append(0.0)
            for batch, start in enumerate(starts):
                first = (repetition + batch) % len(entries)
                for entry in (*entries[first:], *entries[:first]):
                    asked = conversations[start : start + concurrency]
                    records = entry.answer(asked, generation, concurrency, start)
                    entry.seconds[-1] += total_seconds(records)
                    if repetition == 0:
                        entry.records += [replace(record, batch=batch) for record in records]
                    advance(1)


def speedups(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Seconds (median over repetitions) of each run, and the speed-up against the baseline.

    A speed-up is the median of the ratios within the repetitions, with the least and the most.
    """
    base = next((run for run in runs if run.draft == NONE), runs[0])
    rows = []
    for run in runs:
        ratios = [b / own for b, own in zip(base.seconds, run.seconds, strict=True)]
        rows.append(
            {
                "name": run.name,
                "seconds": median(run.seconds),
                "speedup": None if run is base else median(ratios),
                "least": min(ratios),
                "most": max(ratios),
            }
        )
    return rows


def show(measurement: Measurement, console: Console | None = None) -> None:
    """Print the tables, and the verdict on each draft."""
    console = console or Console()
    console.print(comparison_table(speedups(measurement.runs)))
    console.print(run_table(measurement.runs))
    console.print(position_table(measurement.runs))
    for run in measurement.runs:
        if run.draft == NONE or run.figures()["ceiling"]["verdict"] == UNKNOWN:
            continue
        table = ceiling_table(run)
        if table:
            console.print(table)
        console.print(verdict_line(run), highlight=False)


def _prompts(options: argparse.Namespace) -> list[Conversation]:
    if options.dataset:
        return select_prompts(options)
    if options.subset or options.category or options.sub_category:
        raise ValueError("--subset, --category and --sub-category choose from a --dataset; name it")
    return [Conversation(str(i), (text,)) for i, text in enumerate(PROMPTS)][: options.num_prompts]


def _has_confidence(engine: Engine) -> bool:
    draft = engine.config.draft
    return isinstance(draft, DraftConfig) and draft.confidence != "none"


def _check_sweep(options: argparse.Namespace, engines: Sequence[Engine]) -> None:
    """Refuse a sweep that no draft can follow."""
    if options.num_speculative_tokens and all(e.config.draft is None for e in engines):
        raise ValueError("--num-speculative-tokens: there is no draft; leave it out")
    if options.confidence_threshold and not any(map(_has_confidence, engines)):
        raise ValueError("--confidence-threshold: no draft has a confidence head; leave it out")


def _sweep(name: str, engine: Engine, options: argparse.Namespace) -> list[EngineEntry]:
    """The entries of a draft: one for each number of drafts and each threshold that it can take."""
    counts: list[int | None] = [None]
    thresholds: list[float | None] = [None]
    if engine.config.draft is not None:
        counts = options.num_speculative_tokens or counts
    if _has_confidence(engine):
        thresholds = options.confidence_threshold or thresholds
    entries = []
    for count in counts:
        for threshold in thresholds:
            switches = {"num_drafts": count, "confidence_threshold": threshold}
            given = {key: value for key, value in switches.items() if value is not None}
            label = [short_name(name)]
            label += [f"n={count}"] if count is not None else []
            label += [f"c={threshold:g}"] if threshold is not None else []
            made = variant(engine, **given) if given else engine
            decode = made.config.decode
            entries.append(
                EngineEntry(
                    name=" ".join(label),
                    draft=name,
                    num_drafts=decode.num_drafts,
                    confidence_threshold=decode.confidence_threshold,
                    engine=made,
                )
            )
    return entries
