"""How a pair is decoded: frozen, validated, hashable. Each distinct value is one program."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dspark_jax.tiers import BatchCosts, is_positive


def require(condition: bool, message: str) -> None:
    """Raise ValueError with the message unless the condition holds."""
    if not condition:
        raise ValueError(message)


@dataclass(frozen=True)
class DecodeConfig:
    """Static switches of a run: each distinct value is one compiled program."""

    max_length: int  # prompt and output together, in tokens
    prefill_chunk: int = 256
    num_drafts: int = 0  # P; 0 is plain decoding
    confidence_threshold: float = 0.0
    costs: tuple[BatchCosts, ...] = ()  # of each batch: verification is scheduled by them
    temperatures: tuple[float, ...] = ()  # of the confidence logits, by position; () is 1
    rejection: Literal["token", "block", "gumbel"] = "token"
    draft_sampling: Literal["probabilistic", "greedy"] = "probabilistic"
    draft_top_k: int = 0
    draft_truncation: bool = False
    sampled: bool = True  # False: every row is greedy; no noise, no law of the whole vocabulary
    controls: bool = False  # rows may bring a bias, penalties or a least length
    logprobs: int = 0  # most likely tokens to report; 0 = report nothing at all
    ceiling: bool = False  # report what draft and target law allow at each position
    # Of attention and cache writes. "auto": kernels where they run; "pallas": kernels, or an error.
    implementation: Literal["auto", "pallas", "xla"] = "auto"

    def __post_init__(self) -> None:
        require(self.max_length >= 2, f"max_length must be at least 2, got {self.max_length}")
        require(self.prefill_chunk >= 1, f"prefill_chunk must be positive: {self.prefill_chunk}")
        require(self.num_drafts >= 0, f"num_drafts cannot be negative: {self.num_drafts}")
        require(
            0.0 <= self.confidence_threshold <= 1.0,
            f"confidence_threshold must be within 0 and 1, got {self.confidence_threshold}",
        )
        for name, choices in (
            ("rejection", ("token", "block", "gumbel")),
            ("draft_sampling", ("probabilistic", "greedy")),
        ):
            value = getattr(self, name)
            require(value in choices, f"{name} must be one of {choices}, got {value!r}")
        require(self.logprobs >= 0, f"logprobs cannot be negative: {self.logprobs}")
        require(self.sampled or not self.ceiling, "ceiling needs laws: set sampled")
        require(self.draft_top_k >= 0, f"draft_top_k cannot be negative: {self.draft_top_k}")
        self._check_schedule()

    def _check_schedule(self) -> None:
        require(
            not self.costs or self.confidence_threshold == 0.0,
            "verification is scheduled by costs; leave confidence_threshold out",
        )
        for one in self.costs:
            most = one.batch * self.step_rows
            require(
                one.tokens[-1] == most,
                f"costs of batch {one.batch} end at {one.tokens[-1]} verified tokens, a round of"
                f" {self.num_drafts} drafts verifies up to {most}",
            )
        require(
            not self.temperatures or len(self.temperatures) >= self.num_drafts,
            f"{len(self.temperatures)} temperatures are too few for {self.num_drafts} drafts",
        )
        require(
            all(map(is_positive, self.temperatures)),
            f"temperatures must be above 0, and float32 numbers, got {list(self.temperatures)}",
        )

    @property
    def verification(self) -> Literal["fixed", "threshold", "scheduled"]:
        """What decides how many drafts are verified."""
        if self.costs:
            return "scheduled"
        return "threshold" if self.confidence_threshold else "fixed"

    @property
    def step_rows(self) -> int:
        """Rows of one verify pass: the anchor and its drafts (T)."""
        return self.num_drafts + 1
