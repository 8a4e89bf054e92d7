"""How many tokens a scheduled round may verify, and what a round of as many costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

QUARTERS = 4  # tiers of a batch: each is a copy of the target in the compiled round
LEAST_SAVING = 0.02  # of a round's time; a tier that saves less is not worth its copy
LEAST, MOST = 2.0**-126, (2 - 2.0**-23) * 2.0**127  # of float32: what programs compute with


def is_positive(value: Any) -> bool:
    """Whether a value is a number above 0 that stays one in float32."""
    return isinstance(value, int | float) and value is not True and LEAST <= value <= MOST


@dataclass(frozen=True)
class BatchCosts:
    """Cost of a round of `batch` rows, all in one unit (microseconds where it was measured).

    `plain` is a round that drafts nothing. `rounds[i]` is a drafted round that verifies `tokens[i]`
    tokens, anchors included; the last tier holds every token of the batch. They are of greedy
    rounds or of sampled ones, or of both where `sampled` is None.
    """

    batch: int
    plain: float
    tokens: tuple[int, ...]
    rounds: tuple[float, ...]
    sampled: bool | None = None

    def __post_init__(self) -> None:
        if not all(type(count) is int for count in (self.batch, *self.tokens)):
            raise ValueError(f"a batch and verified tokens are whole numbers: {self}")
        if self.batch < 1 or not self.tokens or len(self.tokens) != len(self.rounds):
            raise ValueError(f"costs need a batch, and one cost for each tier: {self}")
        if list(self.tokens) != sorted(set(self.tokens)) or self.tokens[0] < self.batch:
            raise ValueError(f"verified tokens must increase and hold every anchor: {self}")
        if not all(map(is_positive, (self.plain, *self.rounds))):
            raise ValueError(f"every cost must be above 0, and a float32 number: {self}")
        if not (self.sampled is None or isinstance(self.sampled, bool)):
            raise ValueError(f"sampled must be true, false or null: {self}")

    def pruned(self, saving: float = LEAST_SAVING) -> BatchCosts:
        """Without the tiers that cost nearly what the next larger one does."""
        kept = [len(self.tokens) - 1]
        for tier in reversed(range(len(self.tokens) - 1)):
            if self.rounds[tier] < (1 - saving) * self.rounds[kept[0]]:
                kept.insert(0, tier)
        return replace(
            self,
            tokens=tuple(self.tokens[tier] for tier in kept),
            rounds=tuple(self.rounds[tier] for tier in kept),
        )

    def at(self, share: float) -> float:
        """Cost of a drafted round that verifies this share of all tokens, between the tiers."""
        import numpy as np  # late: a command reads its arguments before anything heavy

        return float(np.interp(share * self.tokens[-1], self.tokens, self.rounds))

    def envelope(self) -> np.ndarray:
        """Cost [N + 1] of a drafted round by verified tokens: the lower convex envelope.

        The measured cost is a step function, on which Algorithm 1 would stop at the first step; up
        to the smallest tier a round costs what that tier does.
        """
        import numpy as np

        hull: list[tuple[int, float]] = []
        for point in zip((0, *self.tokens), (self.rounds[0], *self.rounds), strict=True):
            while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-1], point):
                hull.pop()
            hull.append(point)
        tokens, costs = zip(*hull, strict=True)
        return np.interp(np.arange(self.tokens[-1] + 1), tokens, costs)


def _slope(a: tuple[int, float], b: tuple[int, float]) -> float:
    return (b[1] - a[1]) / (b[0] - a[0])


def verified_tiers(batch: int, step_rows: int) -> tuple[int, ...]:
    """Tiers of a batch that are measured: all of its tokens, and the other quarters of them.

    The smallest leaves every row a draft on average: with fewer, plain decoding is what pays.
    """
    most = batch * step_rows
    tiers = {-(-most * part // QUARTERS) for part in range(1, QUARTERS + 1)}
    return tuple(sorted(tier for tier in tiers if tier >= min(2 * batch, most)))


def modelled_costs(batch: int, step_rows: int) -> BatchCosts:
    """Costs by a model, for a device on which none were measured.

    Reading the weights takes as long as the arithmetic of four tokens, drafting as long as half of
    a plain round of one row.
    """
    tokens = verified_tiers(batch, step_rows)
    return BatchCosts(batch, 4.0 + batch, tokens, tuple(6.5 + n for n in tokens))


def costs_between(costs: Sequence[BatchCosts], batch: int, sampled: bool) -> BatchCosts:
    """The costs of a batch, interpolated where it lies between two that were measured.

    Raises ValueError for a batch outside of them.
    """
    table = [one for one in costs if one.sampled in (sampled, None)]
    below = max((one for one in table if one.batch <= batch), key=_rows, default=None)
    above = min((one for one in table if one.batch >= batch), key=_rows, default=None)
    if below is None or above is None:
        raise ValueError(_lacking(table, batch, sampled))
    if below is above:
        return below
    share = (batch - below.batch) / (above.batch - below.batch)
    step_rows = above.tokens[-1] // above.batch
    sizes = verified_tiers(batch, step_rows)

    def mixed(low: float, high: float) -> float:
        return low + share * (high - low)

    rounds = [mixed(below.at(size / sizes[-1]), above.at(size / sizes[-1])) for size in sizes]
    return BatchCosts(batch, mixed(below.plain, above.plain), sizes, tuple(rounds), above.sampled)


def _rows(costs: BatchCosts) -> int:
    return costs.batch


def costs_of(costs: Sequence[BatchCosts], batch: int, sampled: bool) -> BatchCosts:
    """The costs of a batch; raises ValueError where it was not measured."""
    for one in costs:
        if one.batch == batch and one.sampled in (sampled, None):
            return one
    raise ValueError(
        f"the cost table has {_lacking(costs, batch, sampled)}; measure it with python -m bench"
        f" costs --max-batch {batch} or engine.profile_costs()"
    )


def _lacking(costs: Sequence[BatchCosts], batch: int, sampled: bool) -> str:
    kind = "sampled" if sampled else "greedy"
    known = ", ".join(str(one.batch) for one in costs if one.sampled in (sampled, None)) or "none"
    return f"no batch of {batch} rows for {kind} rounds, only {known}"
