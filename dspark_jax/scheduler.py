"""Requests on their way through slots, and what their rounds amount to. Plain Python, no jax."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence

from dspark_jax.request import Chunk, FinishReason, Origin, Result, SamplingParams
from dspark_jax.text import TextStream

Logprobs = list[dict[int, float]] | None  # one entry a token: the token's own first


class Request:
    """One prompt, what was asked of it, and what it has got so far.

    Rounds are counted as the reference evaluator counts them: a row runs rounds while the sum of
    its acceptance lengths is below `max_tokens`, and none of them is cut at the cap. A stop ends
    a row at its first place: inside the accepted prefix the round counts only the drafts up to
    it, all accepted, and no bonus.
    """

    def __init__(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        seed: int,
        stop_ids: Sequence[int],
        text: TextStream,
    ) -> None:
        self.prompt_ids = list(prompt_ids)
        self.params = params
        self.seed = seed
        self.stop_ids = tuple(stop_ids)
        self.finish_reason: FinishReason | None = None
        self.acceptance_lengths: list[int] = []
        self.proposal_lengths: list[int] = []
        self.accepted_drafts: list[int] = []
        self.possible_acceptance: list[list[float]] = []
        self.token_ids: list[int] = []
        self._pieces: list[str] = []
        self._origins: list[Origin] = []
        self._logprobs: list[dict[int, float]] = []
        self._text = text
        self._ending: FinishReason | None = None  # set by the last token that is kept
        self._told = 0  # tokens that `take_chunk` gave out
        self._started: float | None = None
        self._ended: float | None = None

    def start(self) -> None:
        """Start the clock: the request got its slot."""
        self._started = time.perf_counter()

    @property
    def seconds(self) -> float:
        """From admission to the last token, or to now."""
        if self._started is None:
            return 0.0
        return (self._ended or time.perf_counter()) - self._started

    def take_first(self, token: int, logprobs: Logprobs = None) -> None:
        """Take the token that prefill drew; a stop ends the request without a round."""
        self._append(token, "target")
        self._report(logprobs)
        if self._ending == "stop":
            self._finish()

    def take_round(
        self,
        tokens: Sequence[int],
        accepted: int,
        proposed: int,
        done: bool,
        logprobs: Logprobs = None,
        possible: Sequence[float] = (),
    ) -> None:
        """Take the tokens of one round, `accepted` of `proposed` drafts among them.

        `done` is the device's word that the row met a stop token or its cap. Tokens past the cap
        are dropped, but they count for the round. `logprobs` has one entry a token, `possible` one
        a draft where it was computed.
        """
        emitted = len(tokens)
        for index, token in enumerate(tokens):
            if self._ending:
                break
            self._append(token, _origin(index, accepted, proposed))
            if self._text.stopped and index < accepted:
                emitted = accepted = proposed = index + 1
        self._report(logprobs)
        self.acceptance_lengths.append(emitted)
        self.accepted_drafts.append(accepted)
        self.proposal_lengths.append(proposed)
        self.possible_acceptance.append(list(possible[:proposed]))
        if done or self._ending == "stop":
            self._finish()

    def take_chunk(self) -> Chunk:
        """What came in since the last call."""
        begin, self._told = self._told, len(self.token_ids)
        return Chunk(
            token_ids=self.token_ids[begin:],
            pieces=self._pieces[begin:],
            origins=self._origins[begin:],
            logprobs=None if self.params.logprobs is None else self._logprobs[begin:],
            finish_reason=self.finish_reason,
        )

    def result(self) -> Result:
        """The finished request."""
        if self.finish_reason is None:
            raise RuntimeError("the request is not finished")
        return Result(
            text="".join(self._pieces),
            token_ids=self.token_ids,
            finish_reason=self.finish_reason,
            acceptance_lengths=self.acceptance_lengths,
            proposal_lengths=self.proposal_lengths,
            accepted_drafts=self.accepted_drafts,
            possible_acceptance=self.possible_acceptance if any(self.possible_acceptance) else None,
            from_draft=[origin == "draft" for origin in self._origins],
            seconds=self.seconds,
            prompt_tokens=len(self.prompt_ids),
            seed=self.seed,
            logprobs=None if self.params.logprobs is None else self._logprobs,
        )

    def _append(self, token: int, origin: Origin) -> None:
        is_stop = token in self.stop_ids
        self.token_ids.append(token)
        may_stop = len(self.token_ids) > self.params.min_tokens
        piece = "" if is_stop else self._text.push(token, may_stop)
        if is_stop or self._text.stopped:
            self._ending = "stop"
        elif len(self.token_ids) == self.params.max_tokens:
            self._ending = "length"
        if self._ending:
            piece += self._text.finish()
        self._pieces.append(piece)
        self._origins.append(origin)

    def _report(self, logprobs: Logprobs) -> None:
        """Keep the log-probabilities of the tokens that were kept."""
        missing = len(self.token_ids) - len(self._logprobs)
        self._logprobs += (logprobs or [])[:missing]

    def _finish(self) -> None:
        self.finish_reason = self._ending or "length"
        self._ended = time.perf_counter()


def _origin(index: int, accepted: int, proposed: int) -> Origin:
    if index < accepted:
        return "draft"
    if proposed == 0:
        return "target"
    return "bonus" if accepted == proposed else "corrected"


class Scheduler:
    """Hands waiting requests to slots, in turns: a turn starts when the one before has ended."""

    def __init__(self, max_batch: int, requests: Iterable[Request]) -> None:
        self.max_batch = max_batch
        self._waiting = deque(requests)
        self._slots: list[Request] = []

    def next_turn(self) -> list[Request]:
        """The requests of the next turn, in slot order; empty when all were served."""
        if self.running():
            raise RuntimeError("a turn is still running")
        self._slots = [
            self._waiting.popleft() for _ in range(min(self.max_batch, len(self._waiting)))
        ]
        return self._slots

    def running(self) -> list[tuple[int, Request]]:
        """The unfinished requests of this turn with their slots."""
        return [
            (slot, request)
            for slot, request in enumerate(self._slots)
            if request.finish_reason is None
        ]


def batch_tier(requests: int, max_batch: int) -> int:
    """Rows of the smallest batch that holds the requests: a power of two, or `max_batch`."""
    return min(1 << (requests - 1).bit_length(), max_batch)
