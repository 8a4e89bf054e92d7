"""Acceptance and latency of one pair on SPEED-Bench, JSONL with `turns`, or a user's own prompts.

As many requests are on their way as the concurrency asked for, and the next is sent when one ends;
several concurrencies make a sweep.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from rich.console import Console

from bench.datasets import Conversation, read_conversations, select
from bench.output import check_outputs, write_outputs
from bench.pairs import (
    EMBEDDED_DRAFT,
    NONE,
    add_model_flags,
    add_prompt_flags,
    brings_draft,
    load_drafts,
    short_name,
)
from bench.progress import progress_bar
from bench.records import Curves, Measurement, Run, environment, typed
from bench.serving import Generation, answer, fitting, warm_up
from bench.tables import group_table, latency_table, position_table, run_table
from convert.flags import Parser, positive
from dspark_jax.calibration import REMEDY
from dspark_jax.engine import Engine
from dspark_jax.files import read_object
from dspark_jax.generate import tell
from dspark_jax.state import MAX_ROUNDS

DRAFT_FLAGS = ("num_speculative_tokens", "confidence_threshold", "verification", "calibration")


def build_parser() -> argparse.ArgumentParser:
    """The flags of `bench speed`."""
    parser = Parser(prog="bench speed", description=__doc__, allow_abbrev=False)
    add_model_flags(parser)
    add = parser.add_argument
    add("--draft", metavar="DIR", help="folder, hub id, ngram, none (the embedded draft)")
    add("--num-speculative-tokens", type=positive, metavar="N", help="drafts a round")
    add("--confidence-threshold", type=float, metavar="C", help="cut drafts below it (0 is off)")
    add(
        "--verification",
        choices=("fixed", "threshold", "scheduled"),
        help="of drafts: all, cut by the threshold, or those that are worth their cost (fixed)",
    )
    add("--calibration", metavar="FILE", help="of bench calibrate, for the confidence head")
    add_prompt_flags(parser)
    add("--output-len", type=positive, default=256, metavar="N", help="tokens at most (256)")
    add(
        "--max-concurrency",
        type=positive,
        nargs="+",
        default=[1],
        metavar="C",
        help="requests at a time; several make a sweep (1)",
    )
    add(
        "--rounds-per-call",
        type=positive,
        default=1,
        metavar="N",
        help=f"rounds between two outputs, at most {MAX_ROUNDS} (1)",
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; raises ValueError for what a caller can mend."""
    options = build_parser().parse_args(arguments)
    if options.dataset is None:
        raise ValueError("name the prompts: --dataset FILE, or a folder of SPEED-Bench")
    if options.rounds_per_call > MAX_ROUNDS:
        raise ValueError(f"--rounds-per-call is at most {MAX_ROUNDS}: {options.rounds_per_call}")
    check_outputs(options)
    reliability = reliability_of(options.calibration)
    chosen = select_prompts(options)
    generation = generation_of(options, options.rounds_per_call)
    brought = EMBEDDED_DRAFT if brings_draft(options) else NONE
    name = brought if options.draft is None else options.draft
    flags = {key: getattr(options, key) for key in DRAFT_FLAGS}
    given = {key: value for key, value in flags.items() if value is not None}
    (engine,) = load_drafts(options, [name], max(options.max_concurrency), **given)
    kept = fitting(engine, chosen, generation, options.drop_long)
    if len(kept) < len(chosen):
        tell(f"note: {len(chosen) - len(kept)} prompts above --max-length are left out")
    runs = [measure(engine, name, kept, generation, c) for c in options.max_concurrency]
    measurement = Measurement("speed", vars(options), environment(engine), runs, reliability)
    write_outputs(measurement, options)
    show(measurement)
    return 0


def reliability_of(path: str | None) -> Curves | None:
    """The diagram that `bench calibrate` kept beside the temperatures."""
    if path is None:
        return None
    kept = read_object(path, REMEDY).get("reliability")
    try:
        diagram: Curves | None = typed("reliability", kept, Curves | None)
    except ValueError as error:
        raise ValueError(f"calibration {path}: {error}; {REMEDY}") from None
    return diagram


def select_prompts(options: argparse.Namespace) -> list[Conversation]:
    """The prompts that the flags name."""
    return select(
        read_conversations(options.dataset, options.subset),
        categories=options.category,
        sub_categories=options.sub_category,
        most=options.num_prompts,
        shuffle_seed=None if options.disable_shuffle else options.seed,
    )


def generation_of(options: argparse.Namespace, rounds_per_call: int) -> Generation:
    """How the flags want prompts continued; raises ValueError for a value out of range."""
    generation = Generation(
        output_len=options.output_len,
        temperature=options.temperature,
        seed=options.seed,
        ignore_eos=options.ignore_eos,
        chat_template=not options.skip_chat_template,
        enable_thinking=options.enable_thinking,
        rounds_per_call=rounds_per_call,
    )
    generation.params(0)
    return generation


def measure(
    engine: Engine,
    name: str,
    conversations: Sequence[Conversation],
    generation: Generation,
    concurrency: int,
) -> Run:
    """Answer all turns at one concurrency, after a warm-up."""
    warm_up(engine, conversations[0], generation, min(concurrency, len(conversations)))
    turns = sum(len(one.turns) for one in conversations)
    with progress_bar(f"concurrency {concurrency}", turns) as advance:
        records, left_out = answer(engine, conversations, generation, concurrency, advance=advance)
    if left_out:
        tell(f"note: {left_out} later turns left no room within --max-length and were left out")
    decode = engine.config.decode
    return Run(
        name=f"{short_name(name)} c={concurrency}"
        + (f" {decode.verification}" if decode.verification != "fixed" else ""),
        draft=name,
        num_drafts=decode.num_drafts,
        confidence_threshold=decode.confidence_threshold,
        concurrency=concurrency,
        temperature=generation.temperature,
        records=records,
        left_out=left_out,
    )


def show(measurement: Measurement, console: Console | None = None) -> None:
    """Print the tables."""
    console = console or Console()
    console.print(run_table(measurement.runs))
    console.print(latency_table(measurement.runs))
    console.print(position_table(measurement.runs))
    for field in ("category", "sub_category", "subset"):
        table = group_table(measurement.runs[0], field)
        if table:
            console.print(table)
