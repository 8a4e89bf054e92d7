"""What a caller asks for and gets back. Frozen, validated, free of jax."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Literal

from dspark_jax.config import GREEDY_TEMPERATURE

# The model's or the caller's stop; the cap; the caller's word; an error, which `result` raises.
FinishReason = Literal["stop", "length", "cancelled", "error"]
# Where a token came from: an accepted draft; the target's correction of a rejected draft; the
# target's token after a fully accepted proposal; the target alone, with nothing proposed.
Origin = Literal["draft", "corrected", "bonus", "target"]

MAX_LOGPROBS = 20  # most likely tokens that can be reported beside each emitted one
MAX_BIAS = 300  # entries of a logit bias
# Within these a law in float32 neither overflows nor loses its last token.
MAX_TEMPERATURE, LEAST_TOP_P, MAX_LOGIT_BIAS = 1000.0, 1e-6, 1000.0
REPETITION_PENALTIES = (0.01, 100.0)
# Python iterates over these too, and gets keys, values in no order, or integers.
_NO_LISTS = (Mapping, Set, bytes, bytearray, memoryview)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def integer(name: str, value: Any) -> int:
    """The value as an int; ValueError, with the name, where it is none."""
    try:
        _require(not isinstance(value, bool), f"{name} must be an integer, got {value}")
        return operator.index(value)
    except TypeError:
        raise ValueError(f"{name} must be an integer, got {value!r}") from None


def _number(name: str, value: Any) -> float:
    _require(
        isinstance(value, Real) and not isinstance(value, bool),
        f"{name} must be a number, got {value!r}",
    )
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    _require(math.isfinite(number), f"{name} must be finite, got {number}")
    return number


def items(name: str, values: Any, kind: str) -> tuple[Any, ...]:
    """The values as a tuple; ValueError, with the name and the kind, where they are none."""
    try:
        if isinstance(values, _NO_LISTS):
            raise TypeError
        return tuple(values)
    except TypeError:
        raise ValueError(f"{name} must be {kind}, got {values!r}") from None


def _bias(given: Any) -> dict[int, float]:
    try:
        pairs = dict(given)
    except (TypeError, ValueError):
        raise ValueError(f"logit_bias must map ids to numbers, got {given!r}") from None
    bias = {
        integer("logit_bias", token): _number("logit_bias", value) for token, value in pairs.items()
    }
    _require(len(bias) <= MAX_BIAS, f"logit_bias has {len(bias)} entries, at most {MAX_BIAS} fit")
    _check_ids("logit_bias ids", tuple(bias))
    for value in bias.values():
        _require(
            abs(value) <= MAX_LOGIT_BIAS,
            f"logit_bias must be within -{MAX_LOGIT_BIAS:g} and {MAX_LOGIT_BIAS:g}, got {value}",
        )
    return bias


def _check_ids(name: str, ids: tuple[int, ...]) -> None:
    _require(min(ids, default=0) >= 0, f"{name} cannot be negative: {min(ids, default=0)}")
    _require(max(ids, default=0) < 2**31, f"{name} must be below 2**31: {max(ids, default=0)}")


@dataclass(frozen=True)
class SamplingParams:
    """How one prompt is continued.

    `max_tokens` counts output tokens. A `temperature` (at most 1000) below 1e-5 is greedy. `top_p`
    (1e-6 to 1), `top_k` (0 = off) and `min_p` cut the law as transformers' logits warpers do, in
    the order top_k, top_p, min_p after the temperature. `seed` (64 bits) is drawn and reported when
    None. `stop` strings end the text and are removed from it; `stop_token_ids` add to the model's
    own stop set, which `ignore_eos` drops. `logprobs=n` (0 to 20) reports the log-probability of
    each token and of the n most likely ones under the model's own law, before anything below or
    above cuts it.

    `logit_bias` (id to addend, within -1000 and 1000, at most 300) and `min_tokens` (no stop token
    before) act on the logits first; `repetition_penalty` (0.01 to 100) divides or multiplies the
    logits of ids in the prompt and the output (transformers); `presence_penalty` and
    `frequency_penalty` are subtracted for ids in the output, once and per occurrence (OpenAI). All
    act as if tokens were decoded one by one.

    Raises ValueError for a value out of range.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    min_tokens: int = 0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    def __post_init__(self) -> None:
        self._settle("max_tokens", integer("max_tokens", self.max_tokens))
        self._settle("top_k", integer("top_k", self.top_k))
        for name in ("temperature", "top_p", "min_p"):
            self._settle(name, _number(name, getattr(self, name)))
        _require(self.max_tokens >= 1, f"max_tokens must be at least 1, got {self.max_tokens}")
        _require(self.temperature >= 0, f"temperature cannot be negative: {self.temperature}")
        _require(
            self.temperature <= MAX_TEMPERATURE,
            f"temperature must be at most {MAX_TEMPERATURE:g}, got {self.temperature}",
        )
        _require(
            LEAST_TOP_P <= self.top_p <= 1,
            f"top_p must be within {LEAST_TOP_P:g} and 1, got {self.top_p}",
        )
        _require(self.top_k >= 0, f"top_k cannot be negative (0 is off), got {self.top_k}")
        _require(0 <= self.min_p <= 1, f"min_p must be within 0 and 1, got {self.min_p}")
        if self.seed is not None:
            self._settle("seed", integer("seed", self.seed))
            _require(0 <= self.seed < 2**64, f"seed must be within 0 and 2**64 - 1: {self.seed}")
        self._check_stops()
        self._check_controls()

    def _check_stops(self) -> None:
        kind = "a string or a list of strings"
        stop = (self.stop,) if isinstance(self.stop, str) else items("stop", self.stop, kind)
        _require(
            all(isinstance(s, str) and s for s in stop),
            f"stop must hold strings that are not empty, got {stop!r}",
        )
        self._settle("stop", stop)
        given = items("stop_token_ids", self.stop_token_ids, "a list of token ids")
        ids = tuple(integer("stop_token_ids", i) for i in given)
        _check_ids("stop_token_ids", ids)
        self._settle("stop_token_ids", ids)
        _require(
            isinstance(self.ignore_eos, bool),
            f"ignore_eos must be True or False, got {self.ignore_eos!r}",
        )

    def _check_controls(self) -> None:
        if self.logprobs is not None:
            self._settle("logprobs", integer("logprobs", self.logprobs))
            _require(
                0 <= self.logprobs <= MAX_LOGPROBS,
                f"logprobs must be within 0 and {MAX_LOGPROBS}, got {self.logprobs}",
            )
        self._settle("min_tokens", integer("min_tokens", self.min_tokens))
        _require(
            0 <= self.min_tokens <= self.max_tokens,
            f"min_tokens must be within 0 and max_tokens {self.max_tokens}, got {self.min_tokens}",
        )
        for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
            self._settle(name, _number(name, getattr(self, name)))
        low, high = REPETITION_PENALTIES
        _require(
            low <= self.repetition_penalty <= high,
            f"repetition_penalty must be within {low:g} and {high:g} (1 is off), got"
            f" {self.repetition_penalty}",
        )
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _require(-2 <= value <= 2, f"{name} must be within -2 and 2 (0 is off), got {value}")
        if self.logit_bias is not None:
            self._settle("logit_bias", tuple(_bias(self.logit_bias).items()))  # hashable

    def _settle(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    @property
    def greedy(self) -> bool:
        """True where the target's most probable token is taken."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def controlled(self) -> bool:
        """True where the logits are adjusted before the law is made."""
        return (
            bool(self.logit_bias)
            or self.min_tokens > 0
            or (
                self.repetition_penalty,
                self.presence_penalty,
                self.frequency_penalty,
            )
            != (1.0, 0.0, 0.0)
        )


@dataclass(frozen=True)
class Result:
    """One finished prompt.

    `token_ids` leaves the prompt out; a stop token that ended it is the last id and no part of
    `text`. `acceptance_lengths`, `accepted_drafts` and `proposal_lengths` have one entry a round
    and are not cut at `max_tokens`: the first counts every token that the round emitted, bonus
    included, the second the drafts among them, the third the drafts that were proposed.
    `from_draft` has one entry a token, and so has `logprobs` where it was asked for: ids with
    their log-probabilities, the token's own first, then the likeliest. `possible_acceptance`, where
    the engine computes it, has a row a round: for each proposed draft the sum of min(draft law,
    target law), the chance that exact rejection can accept there. `seconds` run from
    admission to the last token, prefill included, compilation excluded.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    acceptance_lengths: list[int]
    proposal_lengths: list[int]
    accepted_drafts: list[int]
    from_draft: list[bool]
    seconds: float
    prompt_tokens: int
    seed: int
    logprobs: list[dict[int, float]] | None = None
    possible_acceptance: list[list[float]] | None = None


@dataclass(frozen=True)
class Chunk:
    """What a stream has gained: every list has one entry a token of `token_ids`.

    A piece is the text that became certain with its token: whole characters only, and nothing
    that may yet turn out to begin a stop string. `finish_reason` is None until the last chunk,
    which may be empty.
    """

    token_ids: list[int]
    pieces: list[str] = field(repr=False)
    origins: list[Origin] = field(repr=False)
    logprobs: list[dict[int, float]] | None = None
    finish_reason: FinishReason | None = None

    @property
    def text(self) -> str:
        return "".join(self.pieces)
