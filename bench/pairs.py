"""Targets and drafts for a measurement: flags, engines that share one target, variants of them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from convert.flags import positive
from convert.store import is_store
from dspark_jax.engine import Engine
from dspark_jax.generate import set_up_jax, tell
from dspark_jax.loading import EMBEDDED, load

NONE, EMBEDDED_DRAFT = "none", "embedded"


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of what is loaded, for every command that generates."""
    add = parser.add_argument_group("models").add_argument
    add("--target", metavar="DIR", help="folder or hub id (default: the embedded target)")
    add("--dtype", choices=("float32", "bfloat16"), help="default: by device")
    add("--implementation", choices=("auto", "pallas", "xla"), default="auto", help="of kernels")
    add("--max-length", type=positive, default=4096, metavar="N", help="prompt and output (4096)")


def add_prompt_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of prompts and their continuation."""
    add = parser.add_argument_group("prompts").add_argument
    add("--dataset", metavar="PATH", help="file, or folder of SPEED-Bench")
    add("--subset", nargs="+", default=[], help="of a SPEED-Bench folder (qualitative)")
    add("--category", nargs="+", default=[], help="only these")
    add("--sub-category", nargs="+", default=[], help="only these")
    add("--num-prompts", type=positive, metavar="N", help="at most, of each subset")
    add("--disable-shuffle", action="store_true", help="take prompts in the order of the file")
    add("--drop-long", action="store_true", help="leave out prompts above --max-length")
    add("--skip-chat-template", action="store_true", help="prompts as they are")
    add("--enable-thinking", action="store_true", help="let the chat template ask for it")
    add = parser.add_argument_group("generation").add_argument
    add("--temperature", type=float, default=1.0, metavar="T", help="0 is greedy (1)")
    add("--seed", type=int, default=0, metavar="N", help="of shuffle and noise (0)")
    add("--ignore-eos", action="store_true", help="go on past the model's stop tokens")
    add = parser.add_argument_group("output").add_argument
    add("--json", metavar="FILE", help="records of every request, and all figures")
    add("--html", metavar="FILE", help="report with charts, self-contained")


def short_name(name: str) -> str:
    """The last part of a folder or hub id."""
    return name.rstrip("/").rsplit("/", 1)[-1]


def load_drafts(
    options: argparse.Namespace, names: Sequence[str], max_batch: int, **more: Any
) -> list[Engine]:
    """An engine for each draft; they share the arrays of the target.

    A name is a folder, a hub id, `none`, `ngram` or, where the target brings a draft, `embedded`.
    `more` are options of `load`.
    """
    for note in set_up_jax():
        tell(note)
    engines: list[Engine] = []
    for name in names:
        engine = load(
            target_of(options),
            _draft(options, name),
            dtype=options.dtype,
            max_length=options.max_length,
            max_batch=max_batch,
            implementation=options.implementation,
            report=tell,
            **more,
        )
        if engines:
            engine.params = engine.params | {"target": engines[0].params["target"]}
            engine = variant(engine)
        engines.append(engine)
    return engines


def target_of(options: argparse.Namespace) -> str | Path:
    """The folder or hub id of --target."""
    return EMBEDDED / "target" if options.target is None else options.target


def brings_draft(options: argparse.Namespace) -> bool:
    """Whether the target has a draft of its own: the embedded one, and a converted store.

    Raises ValueError for an empty name.
    """
    if options.target == "":
        raise ValueError("--target is empty; name a folder or a hub id, or leave it out")
    return options.target is None or is_store(options.target)


def _draft(options: argparse.Namespace, name: str) -> Any:
    if name == NONE:
        return False
    if name != EMBEDDED_DRAFT:
        return name
    if not brings_draft(options):
        raise ValueError(f"--draft {EMBEDDED_DRAFT}: {options.target} brings no draft; name one")
    return EMBEDDED / "draft" if options.target is None else None


def variant(engine: Engine, **switches: Any) -> Engine:
    """The same networks decoded with other switches of `DecodeConfig`.

    Raises ValueError for a value out of range, and for a threshold without a draft.
    """
    if engine.config.draft is None and switches.get("confidence_threshold"):
        raise ValueError("--confidence-threshold: there is no draft; leave it out")
    config = replace(engine.config, decode=replace(engine.config.decode, **switches))
    return Engine(
        config,
        engine.params,
        engine.tokenizer,
        engine.stop_ids,
        max_batch=engine.max_batch,
        defaults=engine.defaults,
        report=lambda line: None,  # a low acceptance stands in the tables
    )
