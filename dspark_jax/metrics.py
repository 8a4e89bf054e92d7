"""How well drafts were accepted: one definition of each figure, over the rounds of requests.

Definitions follow the evaluator of the published DSpark reference (deepseek-ai/DeepSpec). Micro
figures pool all rounds, so long answers weigh more; macro figures are means over requests. A
figure over no rounds is None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Protocol


class HasRounds(Protocol):
    """A request with one entry a round, such as `dspark_jax.Result`."""

    @property
    def acceptance_lengths(self) -> Sequence[int]: ...
    @property
    def proposal_lengths(self) -> Sequence[int]: ...
    @property
    def accepted_drafts(self) -> Sequence[int]: ...


@dataclass(frozen=True)
class RoundRecord:
    """Rounds read back from a file. Without `accepted_drafts` each is acceptance length - 1.

    That is short by one draft where a stop token ended the request inside an accepted prefix:
    such a round has no bonus token.
    """

    acceptance_lengths: Sequence[int]
    proposal_lengths: Sequence[int]
    accepted_drafts: Sequence[int] = ()

    def __post_init__(self) -> None:
        if not self.accepted_drafts:
            derived = tuple(length - 1 for length in self.acceptance_lengths)
            object.__setattr__(self, "accepted_drafts", derived)
        counts = {len(self.acceptance_lengths), len(self.proposal_lengths)}
        if counts != {len(self.accepted_drafts)}:
            raise ValueError("a record needs one entry a round in each of its lists")


def _pool(requests: Iterable[HasRounds], name: str) -> list[int]:
    return [value for request in requests for value in getattr(request, name)]


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None


def rounds(requests: Iterable[HasRounds]) -> int:
    """Verify passes of the target."""
    return len(_pool(requests, "acceptance_lengths"))


def acceptance_length(requests: Iterable[HasRounds]) -> float | None:
    """Tokens emitted a round, bonus included (micro)."""
    lengths = _pool(requests, "acceptance_lengths")
    return _ratio(sum(lengths), len(lengths))


def drafts_per_round(requests: Iterable[HasRounds]) -> float | None:
    """Drafts proposed a round (micro)."""
    lengths = _pool(requests, "proposal_lengths")
    return _ratio(sum(lengths), len(lengths))


def verified_per_round(requests: Iterable[HasRounds]) -> float | None:
    """Tokens of a request that the target verified a round, the anchor included (micro)."""
    drafts = drafts_per_round(requests)
    return None if drafts is None else drafts + 1


def verify_rate(requests: Sequence[HasRounds]) -> float | None:
    """Tokens emitted for each row that the target verified, anchors included (micro)."""
    proposed = _pool(requests, "proposal_lengths")
    return _ratio(sum(_pool(requests, "acceptance_lengths")), sum(proposed) + len(proposed))


def accept_rates_by_position(requests: Sequence[HasRounds]) -> list[float | None]:
    """Rounds that accepted past position i over rounds that proposed past it (micro).

    This is the survival of the prefix, not the rate given that the position before was accepted.
    """
    proposed = _pool(requests, "proposal_lengths")
    accepted = _pool(requests, "accepted_drafts")
    return [
        _ratio(sum(a > i for a in accepted), sum(p > i for p in proposed))
        for i in range(max(proposed, default=0))
    ]


def survival_by_position(requests: Sequence[HasRounds]) -> list[float | None]:
    """Share of all rounds that emitted more than i + 1 tokens (micro)."""
    lengths = _pool(requests, "acceptance_lengths")
    width = max(_pool(requests, "proposal_lengths"), default=0)
    return [_ratio(sum(n - 1 > i for n in lengths), len(lengths)) for i in range(width)]


def conditional_rates_by_position(requests: Sequence[HasRounds]) -> list[float | None]:
    """Share of the rounds that survived position i - 1 which also survived position i (micro)."""
    survival = [1.0, *survival_by_position(requests)]
    return [
        _ratio(now, before) if before and now is not None else None
        for before, now in pairwise(survival)
    ]


def macro(
    figure: Callable[[Sequence[HasRounds]], float | None], requests: Iterable[HasRounds]
) -> float | None:
    """Mean of a figure over the requests that have rounds, each weighing the same."""
    values = [value for request in requests if (value := figure([request])) is not None]
    return fmean(values) if values else None
