"""Prompts in, results out: the public face of the loop that decodes."""

from __future__ import annotations

import asyncio
import warnings
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jax.sharding import Mesh
from jaxtyping import Array

from dspark_jax.accounting import Request
from dspark_jax.advice import DraftAdvice
from dspark_jax.config import ModelConfig
from dspark_jax.costs import check_schedulable, measure_costs, save_costs
from dspark_jax.intake import Intake, Prompt, settings
from dspark_jax.loop import Loop
from dspark_jax.request import Chunk, Result, SamplingParams, integer, items
from dspark_jax.state import MAX_ROUNDS, Params
from dspark_jax.text import Tokenizer, conversations
from dspark_jax.tiers import BatchCosts

STREAM_ROUNDS = 1  # rounds between two chunks of a stream
SERVE_ROUNDS = 4  # rounds that one who may yet arrive, or a stop string, has to wait for
WARM = (SamplingParams(temperature=0.0), SamplingParams(temperature=1.0))


class Engine:
    """A target, its draft (or none) and everything needed to continue prompts with them.

    `params` is {"target": ..., "draft": ...} in the dtype of `config`, placed on `mesh` where there
    is one. `stop_ids` are the model's own stop tokens. Without a tokenizer prompts must be ids and
    every text is empty. `defaults` apply where a call names no SamplingParams. `report` is told
    once when the draft's acceptance length stays under 1.3 over 50 rounds and more. `folder`, of
    a converted store, takes the file of `profile_costs`.

    All calls share one loop: up to `max_batch` requests decode together, others wait in order of
    arrival, and requests enter and leave while others run. Nothing runs by itself: the loop goes
    on while some call (`generate`, a stream that is read, `step`) drives it, for all requests.
    Calls may come from several threads. A request whose own text or programs fail ends alone; an
    error of the device, and an interrupt of the call that drives, ends all that hold a slot.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: Params,
        tokenizer: Tokenizer | None = None,
        stop_ids: Sequence[int] = (),
        *,
        max_batch: int = 8,
        defaults: SamplingParams | None = None,
        report: Callable[[str], None] = warnings.warn,
        mesh: Mesh | None = None,
        folder: Path | None = None,
    ) -> None:
        if max_batch < 1:
            raise ValueError(f"max_batch must be at least 1, got {max_batch}")
        self.config = config
        self.params = params
        self.tokenizer = tokenizer
        self.stop_ids = tuple(stop_ids)
        self.defaults = defaults or SamplingParams()
        self.mesh = mesh
        self.folder = folder
        limits = config.target.vocab_size, config.decode.max_length
        self._intake = Intake(*limits, tokenizer, stop_ids)
        self._loop = Loop(config, params, max_batch, mesh)
        self._advice = DraftAdvice(config, report)
        self._step: asyncio.Future[list[Request]] | None = None  # that streams of asyncio wait for

    @property
    def clock(self) -> Callable[[], float]:
        """Seconds now, on a clock that stands still while programs are compiled."""
        return self._loop.clock

    @property
    def max_batch(self) -> int:
        """Rows that decode together at most."""
        return self._loop.scheduler.max_batch

    def generate(
        self,
        prompts: str | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Result]:
        """Continue prompts; results come in prompt order.

        A prompt is a string (encoded with the tokenizer's default special tokens) or a list of
        token ids. `params` is one for all or one for each. Raises ValueError, naming the prompt,
        for an empty one, an id outside the vocabulary, or prompt + max_tokens above max_length.
        """
        requests = self.prepare(prompts, params)
        for _ in self.serve(requests):
            pass
        return [request.result() for request in requests]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Chunk]:
        """Continue one prompt and yield what each round adds; chunks join to the result.

        Raises as `generate` does, at the call and not at the first chunk. Closing the iterator
        cancels the request.
        """
        (request,) = self.prepare([prompt], params)
        return self._stream(request)

    def astream(self, prompt: Prompt, params: SamplingParams | None = None) -> AsyncIterator[Chunk]:
        """`stream` for asyncio: any number of them decode together, and none blocks the loop.

        Steps run in a worker thread. Raises as `generate` does, at the call and not at the first
        chunk. Leaving the iteration early and closing it (`aclose`, or a cancelled task) cancels
        the request.
        """
        (request,) = self.prepare([prompt], params)
        return self._astream(request)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        enable_thinking: bool = False,
    ) -> list[Result]:
        """Answer one conversation ({"role": ..., "content": ...} each) or a list of them.

        The tokenizer's chat template makes the prompt and alone adds special tokens. Thinking is
        off by default: the published drafts were trained without it and accept less with it.
        Raises ValueError where there is no template, and as `generate` does.
        """
        prompts = [
            self.chat_ids(one, enable_thinking) for one in conversations("messages", messages)
        ]
        return self.generate(prompts, params)

    def chat_ids(
        self, messages: Sequence[Mapping[str, Any]], enable_thinking: bool = False
    ) -> list[int]:
        """The token ids of a conversation's prompt."""
        tokenizer = self._intake.tokenizer_for("chat")
        text = tokenizer.render_chat(messages, enable_thinking)
        return tokenizer.encode(text, special_tokens=False)

    def prepare(
        self,
        prompts: str | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Request]:
        """Check prompts and make requests, for `serve` once. Raises as `generate` does."""
        return self._intake.requests(prompts, self.defaults if params is None else params)

    def serve(self, requests: Sequence[Request], rounds: int = MAX_ROUNDS) -> Iterator[None]:
        """Decode requests to their end; yields whenever some of them have gained something.

        Between two yields lie at most `rounds` rounds. Raises the error of a request that failed;
        requests that are unfinished when the iterator is closed are cancelled.
        """
        own, pending = set(requests), deque[Request]()
        try:
            for request in requests:
                self._enqueue(request, rounds)
                pending.append(request)
            while pending:
                gained = not own.isdisjoint(self.step())
                while pending and pending[0].finish_reason:
                    gained, error = True, pending.popleft().error
                    if error:
                        raise error
                if gained:
                    yield
        finally:
            for request in pending:
                request.cancel()

    def watch_prompts(self, watch: Callable[[Request, Array], None] | None) -> None:
        """Call `watch(request, array)` when a chunk of a prompt was sent; None ends that.

        `request.prefilled` counts the rows sent. The array (a token that means nothing before the
        last chunk) is there when the chunk has run.
        """
        self._loop.watch = watch

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        rounds: int = SERVE_ROUNDS,
    ) -> Request:
        """Queue one prompt and return its handle; `step` decodes it.

        The handle tells `finish_reason` (None while unfinished), gives what came since the last
        look (`take_chunk`) and, in the end, the `result`. `rounds`: at most so many lie between
        two steps while it runs. Raises ValueError as `generate` does, at once.
        """
        (request,) = self.prepare([prompt], params)
        self._enqueue(request, rounds)
        return request

    def step(self) -> list[Request]:
        """Let every request that can go on go on by some rounds; returns those that gained tokens
        or ended. An empty list is no sign of the end: `busy` is.

        A call runs as many rounds as the least patient of its requests allows (streams 1,
        `submit` 4, `generate` 16; 4 with stop strings, which the device does not know), and
        one while a request waits for a slot or for its prompt.
        """
        changed = self._loop.step()
        for request in changed:
            if request.finish_reason:
                self._advice.count(request)
        return changed

    @property
    def busy(self) -> bool:
        """Whether `step` has work: a request is unfinished, or has ended and holds its slot yet."""
        return self._loop.scheduler.busy

    def cancel(self, request: Request) -> None:
        """End a request where it stands, waiting or running; its slot falls free at the next step.

        Its finish reason is "cancelled", its result what it has got; one that has ended stays.
        Raises ValueError for what was not submitted here.
        """
        if not isinstance(request, Request):
            raise ValueError(f"cancel takes a request that submit gave, got {request!r}")
        if request.loop is not self._loop:
            raise ValueError("the request was not submitted to this engine; cancel it where it was")
        request.cancel()

    def warmup(
        self,
        params: SamplingParams | Sequence[SamplingParams] = WARM,
        batches: Sequence[int] | None = None,
    ) -> None:
        """Compile ahead of the first request what is otherwise compiled when one needs it.

        For requests like `params` (default: greedy and sampled; name others for logit controls
        and log-probabilities) in batches of so many rows (default: every size that the engine
        uses, the powers of two up to `max_batch` and itself). Rows of several kinds run in the
        programs of the most demanding one: name a kind with both its settings for a batch that
        mixes them. Raises ValueError for a batch out of range and RuntimeError while requests run.
        """
        every = range(1, self.max_batch + 1) if batches is None else batches
        sizes = [integer("a batch", size) for size in items("batches", every, "a list")]
        for size in sizes:
            if not 1 <= size <= self.max_batch:
                raise ValueError(f"batch {size} is not within 1 and max_batch {self.max_batch}")
        tiers = dict.fromkeys(map(self._loop.scheduler.tier, sizes))
        self._loop.compile_ahead(settings(params), list(tiers))

    def profile_costs(self, progress: Callable[[BatchCosts], None] = lambda costs: None) -> Path:
        """Measure what rounds cost here by batch and verified tokens, and return the file of it,
        which `load(verification="scheduled")` finds; `progress` is called with each batch's, and
        must not call the engine.

        Most of it is compilation, about a minute a batch size. Raises ValueError without a
        confidence head and where slots are split, RuntimeError while requests run.
        """
        check_schedulable(self.config, self.mesh)
        with self._loop.at_rest():  # a step of another thread waits
            found = measure_costs(self.config, self.params, self.max_batch, progress, self.mesh)
        return save_costs(found, self.config, self.folder, self.mesh)

    def _enqueue(self, request: Request, rounds: int) -> None:
        if integer("rounds", rounds) < 1:
            raise ValueError(f"rounds must be at least 1, got {rounds}")
        most = min(rounds, SERVE_ROUNDS) if request.params.stop else rounds
        request.queue(most, self._loop)
        self._loop.scheduler.submit(request)

    def _stream(self, request: Request) -> Iterator[Chunk]:
        self._enqueue(request, STREAM_ROUNDS)
        try:
            while True:
                if not request.finish_reason:  # others may have driven it to its end
                    self.step()
                chunk = request.checked_chunk()
                if chunk.token_ids or chunk.finish_reason:
                    yield chunk
                if chunk.finish_reason:
                    return
        finally:
            request.cancel()

    async def _astream(self, request: Request) -> AsyncIterator[Chunk]:
        self._enqueue(request, STREAM_ROUNDS)
        try:
            while True:
                if not request.finish_reason:  # others may have driven it to its end
                    await self._next_step()
                chunk = request.checked_chunk()
                if chunk.token_ids or chunk.finish_reason:
                    yield chunk
                if chunk.finish_reason:
                    return
        finally:
            request.cancel()

    async def _next_step(self) -> None:
        """Wait for the step that runs, or run one: all streams of a loop share it."""
        running, loop = self._step, asyncio.get_running_loop()
        if running is None or running.done() or running.get_loop() is not loop:
            self._step = running = asyncio.ensure_future(asyncio.to_thread(self.step))
        await asyncio.shield(running)
