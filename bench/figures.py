"""Figures of recorded requests. What acceptance means is defined in `dspark_jax.metrics` alone."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from itertools import pairwise
from math import sqrt
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from dspark_jax import metrics
from dspark_jax.metrics import RoundRecord

if TYPE_CHECKING:
    from bench.records import Record

PERCENTILES = (50, 90, 99)


def clustered_error(deviations: Iterable[tuple[Hashable, float]], count: int) -> float | None:
    """Standard error of a mean over `count` values that come in clusters (a request is one).

    `deviations` are (cluster, value - mean). None for fewer than two clusters.
    """
    sums: dict[Hashable, float] = defaultdict(float)
    for cluster, deviation in deviations:
        sums[cluster] += deviation
    if len(sums) < 2:
        return None
    squares = sum(value**2 for value in sums.values())
    return sqrt(len(sums) / (len(sums) - 1) * squares) / count


def conversations(records: Sequence[Record]) -> list[RoundRecord]:
    """The rounds of each conversation, its turns one after the other."""
    grouped: dict[tuple[str, str], list[Record]] = defaultdict(list)
    for record in records:
        grouped[record.conversation].append(record)
    return [
        RoundRecord(
            *(
                [value for turn in turns for value in getattr(turn, name)]
                for name in ("acceptance_lengths", "proposal_lengths", "accepted_drafts")
            )
        )
        for turns in grouped.values()
    ]


def acceptance(records: Sequence[Record]) -> dict[str, Any]:
    """Acceptance length (micro with its standard error, and macro), rates, rounds, histogram.

    The macro figure is the mean over conversations, as in SPEED-Bench.
    """
    mean = metrics.acceptance_length(records)
    lengths = [(r.conversation, n) for r in records for n in r.acceptance_lengths]
    error = clustered_error(((q, n - (mean or 0.0)) for q, n in lengths), len(lengths))
    return {
        "requests": len(records),
        "rounds": metrics.rounds(records),
        "acceptance_length": mean,
        "standard_error": error if lengths else None,
        "acceptance_length_macro": metrics.macro(metrics.acceptance_length, conversations(records)),
        "drafts_per_round": metrics.drafts_per_round(records),
        "verified_per_round": metrics.verified_per_round(records),
        "verify_rate": metrics.verify_rate(records),
        "accept_rates_by_position": metrics.accept_rates_by_position(records),
        "survival_by_position": metrics.survival_by_position(records),
        "conditional_rates_by_position": metrics.conditional_rates_by_position(records),
        "histogram": dict(sorted(Counter(n for _, n in lengths).items())),
    }


def by_group(records: Sequence[Record], name: str) -> dict[str, dict[str, Any]]:
    """Acceptance and speed of each value of a field; empty where no record names one."""
    groups: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        groups[getattr(record, name)].append(record)
    if set(groups) == {""}:
        return {}
    return {
        value: {
            "requests": len(group),
            "rounds": metrics.rounds(group),
            "acceptance_length": metrics.acceptance_length(group),
            "acceptance_length_macro": metrics.macro(
                metrics.acceptance_length, conversations(group)
            ),
            "tokens_per_second_per_request": fmean(
                record.output_tokens / record.arrivals[-1][0] for record in group
            ),
        }
        for value, group in sorted(groups.items())
    }


def latency(records: Sequence[Record]) -> dict[str, Any]:
    """Throughput in tokens a second, and latencies in seconds with their percentiles.

    time_to_first_token: from when the request was sent. inter_token_latency: between two
    outputs of a request; a round's tokens arrive as one output. time_per_output_token: of a
    request, its time after the first token over the tokens after it.
    """
    seconds = total_seconds(records)
    tokens = sum(record.output_tokens for record in records)
    gaps = [b[0] - a[0] for r in records for a, b in pairwise(r.arrivals)]
    per_token = [
        (r.arrivals[-1][0] - r.arrivals[0][0]) / (r.output_tokens - 1)
        for r in records
        if r.output_tokens > 1
    ]
    return {
        "seconds": seconds,
        "output_tokens": tokens,
        "tokens_per_second": tokens / seconds if seconds else None,
        "time_to_first_token": _percentiles([record.arrivals[0][0] for record in records]),
        "inter_token_latency": _percentiles(gaps),
        "time_per_output_token": _percentiles(per_token),
    }


def total_seconds(records: Sequence[Record]) -> float:
    """Seconds of all batches, one after the other, each up to the end of its last request."""
    ends: dict[int, float] = {}
    for record in records:
        end = record.sent + record.arrivals[-1][0]
        ends[record.batch] = max(ends.get(record.batch, 0.0), end)
    return sum(ends.values())


def _percentiles(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    found = {f"p{p}": float(np.percentile(values, p)) for p in PERCENTILES}
    return {"mean": fmean(values), **found}
