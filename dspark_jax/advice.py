"""The word that a draft does not fit its target: the text alone would not show it."""

from __future__ import annotations

from collections.abc import Callable

from dspark_jax.accounting import Request
from dspark_jax.config import ModelConfig, NgramConfig

JUDGED_ROUNDS, LEAST_ACCEPTANCE = 50, 1.3  # a draft that fits accepts more over as many rounds
LOW_ACCEPTANCE = (
    "the acceptance length over {rounds} rounds is {length:.2f}: this draft hardly helps this"
    " target"
)
NETWORK_CAUSES = (
    ". Usual causes: thinking is on with a draft trained without it, the target is a base"
    " model and the draft was trained on its instruct version (or the other way round), the wrong"
    " slot layout (sample_from_anchor), the wrong taps (target_layer_ids)"
)


class DraftAdvice:
    """Counts the rounds of finished requests and says once when the draft hardly helps.

    Proposals that a threshold or a schedule cuts are short on purpose, so they are not judged.
    """

    def __init__(self, config: ModelConfig, report: Callable[[str], None]) -> None:
        judged = config.draft is not None and config.decode.verification == "fixed"
        self._report = report if judged else None
        self._causes = "" if isinstance(config.draft, NgramConfig) else NETWORK_CAUSES
        self._rounds = self._tokens = 0

    def count(self, request: Request) -> None:
        """Take in a request that has ended, and judge all so far."""
        self._rounds += len(request.acceptance_lengths)
        self._tokens += sum(request.acceptance_lengths)
        if self._report is None or self._rounds < JUDGED_ROUNDS:
            return
        length = self._tokens / self._rounds
        if length < LEAST_ACCEPTANCE:
            report, self._report = self._report, None
            report(LOW_ACCEPTANCE.format(rounds=self._rounds, length=length) + self._causes)
