"""A request on its way, and what its rounds amount to. Plain Python, no jax."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from dspark_jax.request import Chunk, FinishReason, Origin, Result, SamplingParams
from dspark_jax.text import TextStream

Logprobs = list[dict[int, float]] | None  # one entry a token: the token's own first


class Clock:
    """Seconds that leave pauses out: nobody's request is charged with a compilation."""

    def __init__(self) -> None:
        # Seconds of the pauses that are over; the begin of the one that lasts.
        self._paused: tuple[float, float | None] = (0.0, None)

    def __call__(self) -> float:
        paused, since = self._paused  # at once: other threads read it during a pause
        return (time.perf_counter() if since is None else since) - paused

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Stand still inside the block."""
        (paused, _), begin = self._paused, time.perf_counter()
        self._paused = paused, begin
        try:
            yield
        finally:
            self._paused = paused + time.perf_counter() - begin, None


class Request:
    """One prompt, what was asked of it, and what it has got so far: `token_ids`, `text`.

    `take_chunk` and `cancel` may be called from any thread, the rest by the one that runs rounds.

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
        self.patience = 1  # rounds at most between two looks at its output
        self.prefilled = 0  # prompt tokens that have been sent to the device
        self.finish_reason: FinishReason | None = None
        self.error: Exception | None = None  # what made it fail
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
        self._clock: Callable[[], float] = time.perf_counter
        self.started: float | None = None  # on the clock that `start` brought
        self._ended: float | None = None
        self.loop: object | None = None  # that has or had it
        self._lock = threading.Lock()

    def queue(self, patience: int, loop: object) -> None:
        """Note which loop has it; ValueError where one has or had it: two would mix its tokens."""
        with self._lock:
            if self.loop is not None:
                raise ValueError("a request is served once; prepare another for the same prompt")
            self.loop, self.patience = loop, patience

    def start(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """The request got its slot: its time begins."""
        self._clock = clock
        self.started = clock()

    @property
    def seconds(self) -> float:
        """From admission to the last token, or to now."""
        if self.started is None:
            return 0.0
        return (self._ended or self._clock()) - self.started

    def take_first(self, token: int, logprobs: Logprobs = None) -> None:
        """Take the token that prefill drew; a stop ends the request without a round."""
        with self._lock:
            if self.finish_reason:
                return
            self._append(token, "target")
            self._report(logprobs)
            if self._ending == "stop":
                self._finish("stop")

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
        are dropped, but they count for the round. A request that has ended takes nothing.
        `logprobs` has one entry a token, `possible` one a draft where it was computed.
        """
        with self._lock:
            if self.finish_reason:
                return
            self._count_round(tokens, accepted, proposed, possible)
            self._report(logprobs)
            if done or self._ending == "stop":
                self._finish(self._ending or "length")

    def _count_round(
        self, tokens: Sequence[int], accepted: int, proposed: int, possible: Sequence[float]
    ) -> None:
        emitted = len(tokens)
        for index, token in enumerate(tokens):
            if self._ending:
                break
            self._append(token, _origin(index, accepted, proposed))
            if self._text.stopped and index < accepted:
                emitted = accepted = proposed = index + 1
        self.acceptance_lengths.append(emitted)
        self.accepted_drafts.append(accepted)
        self.proposal_lengths.append(proposed)
        self.possible_acceptance.append(list(possible[:proposed]))

    def cancel(self) -> None:
        """End it here, with what it has got; one that has ended stays as it is."""
        with self._lock:
            if self.finish_reason is None:
                self._finish("cancelled")

    def fail(self, error: Exception) -> None:
        """End it because of an error, which `result` raises."""
        with self._lock:
            if self.finish_reason is None:
                self.error = error
                self._finish("error")

    @property
    def text(self) -> str:
        """What the output reads so far, as far as it is settled."""
        with self._lock:
            return "".join(self._pieces)

    def take_chunk(self) -> Chunk:
        """What came in since the last call."""
        with self._lock:
            begin, self._told = self._told, len(self.token_ids)
            return Chunk(
                token_ids=self.token_ids[begin:],
                pieces=self._pieces[begin:],
                origins=self._origins[begin:],
                logprobs=None if self.params.logprobs is None else self._logprobs[begin:],
                finish_reason=self.finish_reason,
            )

    def checked_chunk(self) -> Chunk:
        """`take_chunk`; raises the error of a request that failed."""
        if self.error is not None:
            raise self.error
        return self.take_chunk()

    def result(self) -> Result:
        """The finished request; raises the error that made it fail."""
        if self.error is not None:
            raise self.error
        if self.finish_reason is None:
            raise RuntimeError("the request is not finished")
        return Result(
            text=self.text,
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

    def _finish(self, reason: FinishReason) -> None:
        self._ended = self._clock()
        self.finish_reason = reason


def _origin(index: int, accepted: int, proposed: int) -> Origin:
    if index < accepted:
        return "draft"
    if proposed == 0:
        return "target"
    return "bonus" if accepted == proposed else "corrected"
