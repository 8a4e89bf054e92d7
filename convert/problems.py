"""The one error of this package, which lists every problem found and not only the first."""

from __future__ import annotations

from collections.abc import Sequence

SHOWN = 20  # a wrong config makes every tensor wrong; the first few name the cause


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; `problems` holds one sentence for each reason."""

    def __init__(self, problems: Sequence[str] | str, subject: str = "") -> None:
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        self.subject = subject
        super().__init__(self._message())

    def _message(self) -> str:
        prefix = f"{self.subject}: " if self.subject else ""
        if len(self.problems) == 1:
            return prefix + self.problems[0]
        shown = [f"\n  - {problem}" for problem in self.problems[:SHOWN]]
        more = len(self.problems) - SHOWN
        rest = f"\n  - and {more} more of this kind" if more > 0 else ""
        return f"{prefix}{len(self.problems)} problems:" + "".join(shown) + rest


def raise_problems(problems: Sequence[str], subject: str = "") -> None:
    """Raise one `CheckpointError` over all problems; do nothing when there is none."""
    if problems:
        raise CheckpointError(problems, subject)
