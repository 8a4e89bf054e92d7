"""Possible against realised acceptance: is a slow pair the draft's fault or the engine's?

Token by token, a drafted token is accepted with probability sum(min(draft law, target law)) given
everything before it (Leviathan et al. 2023, theorem 3.5). That sum is the *possible* acceptance;
the share of accepted drafts is the *realised* one. Two sums are held against it: the one of the
laws that the round itself used (a gap: verification is wrong) and the one of the draft's law over
the same text prefilled afresh (a gap: what rounds wrote into the draft's cache is wrong). A low
sum with no gap is a draft that does not fit its target.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from math import sqrt
from statistics import fmean
from typing import TYPE_CHECKING, Any

from bench.figures import clustered_error
from dspark_jax import metrics
from dspark_jax.config import GREEDY_TEMPERATURE

if TYPE_CHECKING:
    from bench.records import Record

APART = 3.0  # standard errors that make a fault
LOW = 0.35  # possible acceptance at the first position under which a draft does not fit
LEAST_ROUNDS = 30  # fewer do not tell anything

GREEDY = "not tested: greedy decoding draws nothing; measure with a temperature above 0"
UNKNOWN = "not tested: the possible acceptance was not recorded"
FEW = f"not tested: fewer than {LEAST_ROUNDS} rounds reached the first position"
FITS = "the engine realises what the draft allows"
MISFIT = "this draft does not fit this target"
FAULT = "engine fault"


def ceiling(records: Sequence[Record], temperature: float, trained: bool = True) -> dict[str, Any]:
    """Possible and realised acceptance by position, the acceptance length that the laws of the
    rounds allow, and the verdict in words.

    Only a draft that was `trained` for its target can be told not to fit it.
    """
    if temperature < GREEDY_TEMPERATURE:
        return {"verdict": GREEDY, "possible_length": None, "in_round": [], "clean": []}
    in_round = _positions(records, "possible_acceptance")
    clean = _positions(records, "clean_acceptance")
    return {
        "verdict": _verdict(in_round, clean, trained),
        "possible_length": _possible_length(in_round, metrics.rounds(records)),
        "in_round": in_round,
        "clean": clean,
    }


def _possible_length(rows: Sequence[dict[str, Any]], rounds: int) -> float | None:
    """Tokens a round, bonus included: each draft that was reached counts with its chance."""
    if not rows:
        return None
    return 1.0 + sum(row["rounds"] * row["possible"] for row in rows) / rounds


def _verdict(
    in_round: Sequence[dict[str, Any]], clean: Sequence[dict[str, Any]], trained: bool
) -> str:
    first = next((positions[0] for positions in (clean, in_round) if positions), None)
    if first is None:
        return UNKNOWN
    if first["rounds"] < LEAST_ROUNDS:
        return FEW
    found = [
        f"{FAULT} ({name}): position {entry['position']} allows {entry['possible']:.3f} and"
        f" realises {entry['realised']:.3f}, {abs(entry['errors_apart']):.1f} standard errors apart"
        for name, entries in (("verification", in_round), ("draft's context", clean))
        for entry in entries
        if entry["rounds"] >= LEAST_ROUNDS and abs(entry["errors_apart"]) > APART
    ]
    if trained and first["possible"] < LOW:
        found.append(f"{MISFIT}: its first position allows {first['possible']:.3f}")
    return "; ".join(found) or FITS


def _positions(records: Sequence[Record], name: str) -> list[dict[str, Any]]:
    """A row for each position that rounds reached, as far as any did."""
    rows: list[dict[str, Any]] = []
    while reached := list(_reached(records, name, len(rows))):
        rows.append(_position(len(rows) + 1, reached))
    return rows


def _reached(
    records: Sequence[Record], name: str, k: int
) -> Iterator[tuple[Hashable, float, bool]]:
    """(request, possible, accepted) of each round whose first k drafts were accepted and which
    proposed another."""
    for record in records:
        laws = getattr(record, name)
        if laws is None:
            continue
        rounds = zip(laws, record.proposal_lengths, record.accepted_drafts, strict=True)
        for possible, proposed, accepted in rounds:
            if accepted >= k and proposed > k and len(possible) > k:
                yield record.conversation, min(max(possible[k], 0.0), 1.0), accepted > k


def _position(position: int, reached: Sequence[tuple[Hashable, float, bool]]) -> dict[str, Any]:
    """Means, and their distance in standard errors.

    Of two errors the larger counts: the one clustered by request, and the one that independent
    coins of these probabilities have. The latter holds where few requests make the former
    uncertain; a round's worth of variance is added, without which a single rejection among
    near-certain drafts would count as a fault.
    """
    count = len(reached)
    gaps = [(request, accepted - possible) for request, possible, accepted in reached]
    gap = fmean(value for _, value in gaps)
    clustered = clustered_error(((q, value - gap) for q, value in gaps), count) or 0.0
    coins = sqrt(sum(p * (1 - p) for _, p, _ in reached) + 1.0) / count
    error = max(clustered, coins)
    return {
        "position": position,
        "rounds": count,
        "possible": fmean(p for _, p, _ in reached),
        "realised": fmean(float(a) for _, _, a in reached),
        "standard_error": error,
        "errors_apart": gap / error,
    }
