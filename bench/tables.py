"""Tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from bench.records import Run


def number(value: float | None, digits: int = 2) -> str:
    """A figure, or a dash where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def with_error(value: float | None, error: float | None) -> str:
    """A mean and its standard error."""
    return number(value) if error is None else f"{number(value)} ± {number(error)}"


def run_table(runs: Sequence[Run]) -> Table:
    """Requests, rounds and acceptance of each run."""
    table = Table(title="acceptance", box=SIMPLE_HEAD)
    for name in ("run", "requests", "rounds", "acceptance length", "macro"):
        table.add_column(name, justify="left" if name == "run" else "right", no_wrap=name == "run")
    for name in ("drafts", "verified", "verify rate"):
        table.add_column(name, justify="right")
    for run in runs:
        found = run.figures()
        table.add_row(
            run.name,
            str(found["requests"]),
            str(found["rounds"]),
            with_error(found["acceptance_length"], found["standard_error"]),
            number(found["acceptance_length_macro"]),
            number(found["drafts_per_round"]),
            number(found["verified_per_round"]),
            number(found["verify_rate"], 3),
        )
    return table


def latency_table(runs: Sequence[Run]) -> Table:
    """Throughput and latency percentiles of each run."""
    table = Table(
        box=SIMPLE_HEAD,
        title="latency in ms: p50 / p90 / p99",
        caption="from when a request was sent; the next is sent when one has ended",
    )
    table.add_column("run", no_wrap=True)
    for name in ("tokens/s", "time to first token", "inter-token latency", "time per output token"):
        table.add_column(name, justify="right")
    for run in runs:
        found = run.figures()["latency"]
        table.add_row(
            run.name,
            number(found["tokens_per_second"], 1),
            *(
                _milliseconds(found[name])
                for name in ("time_to_first_token", "inter_token_latency", "time_per_output_token")
            ),
        )
    return table


def _milliseconds(found: dict[str, float] | None) -> str:
    if found is None:
        return "-"
    return " / ".join(f"{1e3 * found[name]:.1f}" for name in ("p50", "p90", "p99"))


def position_table(runs: Sequence[Run]) -> Table:
    """Rates by position: of the rounds that proposed it, and of those that reached it."""
    table = Table(title="acceptance by position", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("run", no_wrap=True)
    table.add_column("rate", no_wrap=True)
    every = [run.figures() for run in runs]
    width = max((len(found["survival_by_position"]) for found in every), default=0)
    for position in range(width):
        table.add_column(str(position + 1), justify="right")
    rates = {
        "of proposed": "accept_rates_by_position",
        "survival": "survival_by_position",
        "conditional": "conditional_rates_by_position",
    }
    for run, found in zip(runs, every, strict=True):
        if found["survival_by_position"]:
            for label, name in rates.items():
                table.add_row(run.name, label, *(number(rate) for rate in found[name]))
    return table


def group_table(run: Run, field: str) -> Table | None:
    """Acceptance by a field of the prompts; None where they do not have it."""
    groups = run.figures()[f"by_{field}"]
    if not groups:
        return None
    table = Table(box=SIMPLE_HEAD, title=f"by {field.replace('_', ' ')}: {run.name}")
    table.add_column(field.replace("_", " "))
    for name in ("requests", "rounds", "acceptance length", "macro", "tokens/s a request"):
        table.add_column(name, justify="right")
    for value, found in groups.items():
        table.add_row(
            value or "-",
            str(found["requests"]),
            str(found["rounds"]),
            number(found["acceptance_length"]),
            number(found["acceptance_length_macro"]),
            number(found["tokens_per_second_per_request"], 1),
        )
    return table


def comparison_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Seconds, and the change and speed-up against the baseline."""
    table = Table(title="time of the same prompts", box=SIMPLE_HEAD)
    table.add_column("draft")
    for name in ("seconds", "against baseline", "speed-up", "from - to"):
        table.add_column(name, justify="right")
    for row in rows:
        ratio = row["speedup"]
        change = None if ratio is None else 100 * (1 / ratio - 1)
        table.add_row(
            row["name"],
            number(row["seconds"], 3),
            "-" if change is None else f"{change:+.0f}%",
            "-" if ratio is None else f"{ratio:.2f}x",
            "-" if ratio is None else f"{row['least']:.2f} - {row['most']:.2f}",
        )
    return table


def ceiling_table(run: Run) -> Table | None:
    """Possible against realised acceptance by position; None where it was not tested."""
    found = run.figures()["ceiling"]
    if not found["in_round"] and not found["clean"]:
        return None
    table = Table(title=f"ceiling and floor: {run.name}", box=SIMPLE_HEAD)
    table.add_column("laws")
    for name in ("position", "rounds", "possible", "realised", "errors apart"):
        table.add_column(name, justify="right")
    for label, rows in (
        ("of the round", found["in_round"]),
        ("of a fresh prefill", found["clean"]),
    ):
        for row in rows:
            table.add_row(
                label,
                str(row["position"]),
                str(row["rounds"]),
                number(row["possible"], 3),
                number(row["realised"], 3),
                number(row["errors_apart"], 1),
            )
    return table


def verdict_line(run: Run) -> str:
    """What a draft allows, and whether the engine realises it."""
    found = run.figures()["ceiling"]
    length = found["possible_length"]
    allows = "" if length is None else f"allows {length:.2f} tokens a round; "
    return f"{run.name}: {allows}{found['verdict']}"
