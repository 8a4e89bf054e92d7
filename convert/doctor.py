"""The report of `--check`: what was found, from where, whether the pair fits, what it takes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from convert.apply import Dtype, Progress, param_bytes, scan
from convert.dialects import DraftOverrides
from convert.hub import resolve_folder
from convert.names import MAPS
from convert.packaging import read_draft, read_target, share_with_target
from convert.problems import CheckpointError
from convert.sources import DraftSource, Source, TargetSource
from convert.tokens import stop_token_ids
from dspark_jax.cache import cache_bytes, capacity
from dspark_jax.config import DecodeConfig, ModelConfig


@dataclass
class Report:
    """Everything `--check` says; `problems` empty means that the pair fits."""

    target: TargetSource | None = None
    draft: DraftSource | None = None
    problems: list[str] = field(default_factory=list)
    stop_ids: tuple[int, ...] = ()
    memory: dict[str, int] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        return "refused" if self.problems else "fit"


def examine(
    target: str,
    draft: str | None,
    overrides: DraftOverrides,
    *,
    dtype: Dtype | None = None,
    max_length: int = 4096,
    progress: Progress | None = None,
) -> Report:
    """Read a target and perhaps a draft to the last weight; keep no weight. Never raises."""
    report = Report()

    def attempt(step: Callable[[], Any]) -> Any:
        try:
            return step()
        except CheckpointError as error:
            prefix = f"{error.subject}: " if error.subject else ""
            report.problems += [prefix + problem for problem in error.problems]
        return None

    found = report.target = attempt(lambda: read_target(resolve_folder(target)))
    if found is None:
        return report
    report.stop_ids = attempt(lambda: stop_token_ids(found.folder)) or ()
    if draft is not None:
        theirs = attempt(lambda: read_draft(resolve_folder(draft), found, overrides))
        if theirs is not None:
            report.draft = attempt(lambda: share_with_target(theirs, found)) or theirs
    for source in (report.target, report.draft):
        if source is not None:
            attempt(partial(scan, source, progress))
    attempt(lambda: _fit_and_memory(report, found, dtype or stored_dtype(found), max_length))
    return report


def stored_dtype(*sources: Source | None) -> Dtype:
    """Return bfloat16 where every weight is stored so, else float32: neither loses a bit."""
    kinds = {
        source.tensors[piece.source].dtype
        for source in sources
        if source is not None
        for name, entry in source.plan.items()
        for piece in entry.pieces
        if name not in MAPS
    }
    return "bfloat16" if kinds <= {"BF16"} else "float32"


def _fit_and_memory(report: Report, target: TargetSource, dtype: Dtype, max_length: int) -> None:
    """Build the configuration of a run (the last check of fit) and sum its bytes."""
    draft = report.draft
    length = min(max_length, target.config.max_length)
    drafts = draft.config.max_drafts if draft else 0
    try:
        decode = DecodeConfig(max_length=length, num_drafts=drafts)
        config = ModelConfig(target.config, draft.config if draft else None, decode, dtype)
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    size, rows = (2 if dtype == "bfloat16" else 4), capacity(config)
    stacks = [target.config.layers, *([draft.config.layers] if draft else [])]
    report.memory = {
        "target_bytes": param_bytes(target, dtype),
        "draft_bytes": param_bytes(draft, dtype) if draft else 0,
        "cache_bytes": sum(cache_bytes(layers, 1, rows, size) for layers in stacks),
        "max_length": length,
    }
    report.memory["total_bytes"] = sum(report.memory[f"{k}_bytes"] for k in _MEMORY_PARTS)


_MEMORY_PARTS = ("target", "draft", "cache")


def as_json(report: Report) -> str:
    """Return the report as one JSON object."""
    tree = {
        "verdict": report.verdict,
        "problems": report.problems,
        "target": _source_tree(report.target),
        "draft": _source_tree(report.draft),
        "stop_token_ids": list(report.stop_ids),
        "memory": report.memory,
    }
    return json.dumps(tree, indent=2)


def _source_tree(source: Source | None) -> dict[str, Any] | None:
    if source is None:
        return None
    return {
        "folder": str(source.folder),
        "packaging": source.packaging,
        "settings": {
            name: {"value": s.value, "from": s.origin} for name, s in source.settings.items()
        },
        "parameters": sum(entry.size for entry in source.plan.values()),
        "tensors": len(source.tensors),
        "ignored": [entry._asdict() for entry in source.ignored],
        "warnings": list(source.warnings),
    }


def as_text(report: Report) -> str:
    """Return the report for a reader, the verdict last."""
    lines: list[str] = []
    for role, source in (("target", report.target), ("draft", report.draft)):
        if source is not None:
            lines += _source_lines(role, source)
    if report.target is not None:
        lines.append(f"stop token ids   {list(report.stop_ids)}")
    if report.memory:
        lines.append("memory           " + _memory_words(report.memory))
    lines += [f"problem          {problem}" for problem in report.problems]
    return "\n".join([*lines, f"verdict          {report.verdict}"])


def _source_lines(role: str, source: Source) -> list[str]:
    count = sum(math.prod(entry.shape) for entry in source.plan.values())
    lines = [f"{role:<16} {source.folder}", f"  packaging      {source.packaging}"]
    lines.append(f"  parameters     {count:,} from {len(source.tensors)} tensors")
    width = max((len(name) for name in source.settings), default=0)
    for name, setting in source.settings.items():
        lines.append(f"  {name:<{width}}  {_brief(setting.value)}  ({setting.origin})")
    lines += [f"  ignored        {e.name} ({e.file}): {e.reason}" for e in source.ignored]
    return lines + [f"  warning        {warning}" for warning in source.warnings]


def _brief(value: Any) -> str:
    if isinstance(value, list) and len(value) > 3 and len(set(map(str, value))) == 1:
        return f"{len(value)} x {value[0]}"
    return str(value)


def _memory_words(memory: dict[str, int]) -> str:
    parts = [f"{k} {memory[f'{k}_bytes'] / 1e6:,.1f} MB" for k in _MEMORY_PARTS]
    total = memory["total_bytes"] / 1e6
    return f"{total:,.1f} MB ({', '.join(parts)} for one row of {memory['max_length']} tokens)"
