"""The one loop that decodes: requests enter and leave between two calls of `decode_rounds`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import jax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from dspark_jax.accounting import Clock, Request
from dspark_jax.config import ModelConfig
from dspark_jax.placement import move_rows
from dspark_jax.programs import Programs, Tier
from dspark_jax.request import SamplingParams
from dspark_jax.scheduler import Scheduler
from dspark_jax.sharding import DATA
from dspark_jax.state import DecodeState, FirstToken, Params, Rounds


@dataclass(frozen=True)
class Call:
    """Rounds that the device was told to run, and the rows that they are for."""

    running: list[tuple[int, Request]]
    rounds: Rounds


class Loop:
    """Decodes whatever was submitted to its scheduler, one `step` at a time.

    A step gives free slots to waiting requests, runs some chunks of prompts, sends the next call
    of `decode_rounds`, and only then reads the result of the call before: the device need not wait
    for the host. What the host learns one call late (a stop string, a cancellation) costs rounds
    and changes nothing: tokens after the end of a request are dropped.

    The batch is as large as the requests need: it grows when they arrive and shrinks, after a
    while, when they leave. Programs are compiled when a request enters that needs them, never
    when one leaves. In float32 a row's tokens do not depend on the tier that it runs in.
    """

    def __init__(
        self, config: ModelConfig, params: Params, max_batch: int, mesh: Mesh | None = None
    ) -> None:
        self.config = config
        self.scheduler = Scheduler(max_batch, mesh.shape[DATA] if mesh else 1)
        self.programs = Programs(config, params, mesh)
        self.clock = Clock()
        self.watch: Callable[[Request, Array], None] | None = None  # of chunks of prompts
        self._tier = Tier(batch=0)
        self._state: DecodeState | None = None
        self._call: Call | None = None  # sent and not read
        self._lock = threading.Lock()

    def step(self) -> list[Request]:
        """Send the next work, read what has come; returns the requests that gained or ended.

        An error of the device ends every request that holds a slot (`Request.error`); the others
        wait on. Steps of several threads come one after the other.
        """
        with self._lock:
            dropped = self.scheduler.sweep()
            gained: list[Request] = []
            try:
                gained = self._advance()
            except Exception as error:
                self._lose(error)
            except BaseException:
                self._lose(RuntimeError("decoding was interrupted"))
                raise
            dropped += self.scheduler.sweep()
            if not self.scheduler.live():
                self._call = None
            return list(dict.fromkeys([*gained, *dropped]))

    def compile_ahead(self, each: Sequence[SamplingParams], batches: Sequence[int]) -> None:
        """Compile and run once what batches of such requests need, and the moves between them.

        Raises RuntimeError while requests are running.
        """
        with self.at_rest():
            tiers = [Tier.of([one], batch) for batch in batches for one in each]
            for tier in dict.fromkeys(tiers):
                if self.programs.compile_missing(tier):
                    self.programs.warm_up(tier, self.programs.new_state(tier))
            shapes = {(tier.batch, tier.controls): tier for tier in tiers}
            for tier in shapes.values():
                for batch in {*batches} - {tier.batch}:
                    move_rows(self.programs.new_state(tier), [0] * batch)

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """No step runs inside, and the state's memory is free; RuntimeError while requests run."""
        with self._lock, self.clock.pause():
            if any(one.finish_reason is None for one in self.scheduler.live()):
                raise RuntimeError("requests are running; let them end first")
            self._state = None
            yield

    def _advance(self) -> list[Request]:
        self._enter()
        firsts = self._prefill()
        sent, self._call = self._call, self._send()
        return (_read_rounds(sent) if sent else []) + _read_firsts(firsts)

    def _enter(self) -> None:
        """Give slots to those that wait, in a batch and with programs that serve all."""
        scheduler = self.scheduler
        batch = scheduler.choose_batch(self._can_run)
        live, entering = scheduler.live(), scheduler.entering(batch)
        if not live and not entering:
            return
        need = Tier.of([request.params for request in (*live, *entering)], batch)
        if entering and not self._compile(need, entering):
            return
        tier = need.least(self.programs.tiers)
        assert tier is not None, "programs are compiled when a request enters"
        with self.clock.pause():
            state = self._place(tier)
        for slot, request in scheduler.enter():
            request.start(self.clock)
            state = self.programs.admit(tier, state, slot, request)
        if scheduler.vacated:
            state = self.programs.release(tier, state, scheduler.vacated)
            scheduler.vacated.clear()
        self._tier, self._state = tier, state

    def _can_run(self, batch: int) -> bool:
        need = Tier.of([request.params for request in self.scheduler.live()], batch)
        return need.least(self.programs.tiers) is not None

    def _compile(self, need: Tier, entering: Sequence[Request]) -> bool:
        """Compile what is missing; where that fails, the requests that asked for it do."""
        try:
            with self.clock.pause():
                if self.programs.compile_missing(need) and not self.scheduler.live():
                    self._state, self._tier = None, need
                    self._state = self.programs.warm_up(need, self.programs.new_state(need))
        except Exception as error:
            for request in entering:
                request.fail(error)
            return False
        return True

    def _place(self, tier: Tier) -> DecodeState:
        """The state in the shape of a tier: rows that go on are kept, the rest is let go."""
        scheduler, fits = self.scheduler, self._tier.batch == tier.batch
        state, self._state = self._state, None
        if state is not None and not fits and scheduler.live():
            jax.block_until_ready(state)  # a call that runs has working memory of its own
            state = move_rows(state, scheduler.resize(tier.batch))
        elif state is None or not fits:
            del state  # its memory must be free before the new one takes its own
            state = self.programs.new_state(tier)
        if len(scheduler.slots) != tier.batch:
            scheduler.resize(tier.batch)
        return self.programs.fit_controls(tier, state)

    def _prefill(self) -> list[tuple[Request, FirstToken]]:
        """Run some chunks of the prompts that wait; returns the first tokens of those that end."""
        firsts = []
        for _ in range(self.scheduler.chunks_allowed()):
            chunk = self.scheduler.next_chunk(self.config.decode.prefill_chunk)
            if chunk is None:
                break
            assert self._state is not None
            self._state, first = self.programs.prefill(self._tier, self._state, chunk)
            if self.watch:
                self.watch(chunk.request, first.token)
            if chunk.last:
                firsts.append((chunk.request, first))
        return firsts

    def _send(self) -> Call | None:
        running = self.scheduler.running()
        if not running:
            return None
        assert self._state is not None
        count = self.scheduler.rounds()
        self._state, rounds = self.programs.run_rounds(self._tier, self._state, count)
        for array in jax.tree.leaves(rounds):
            array.copy_to_host_async()
        return Call(running, rounds)

    def _lose(self, error: Exception) -> None:
        """End what holds a slot: the state is gone, or may be."""
        self._state = self._call = None
        for request in self.scheduler.live():
            request.fail(error)


def _read_firsts(firsts: Sequence[tuple[Request, FirstToken]]) -> list[Request]:
    """Hand the tokens that prefill drew to their requests."""
    tokens = jax.device_get([first for _, first in firsts])
    for (request, _), first in zip(firsts, tokens, strict=True):
        try:
            logprobs = _logprobs(request, first.logprobs.ids[None], first.logprobs.values[None])
            request.take_first(int(first.token), logprobs)
        except Exception as error:  # of its text: no other request is concerned
            request.fail(error)
    return [request for request, _ in firsts]


def _read_rounds(call: Call) -> list[Request]:
    """Hand each row's rounds to its request, unless it has ended meanwhile."""
    rounds = jax.device_get(call.rounds)
    gained = [(slot, request) for slot, request in call.running if request.finish_reason is None]
    for slot, request in gained:
        try:
            _take_rounds(request, slot, rounds)
        except Exception as error:  # of its text: no other request is concerned
            request.fail(error)
    return [request for _, request in gained]


def _take_rounds(request: Request, slot: int, rounds: Rounds) -> None:
    """Rounds that did not run have zero counts."""
    for index, (emitted, accepted, proposed, done) in enumerate(rounds.counts[slot].tolist()):
        if emitted:
            place = (slot, index, slice(emitted))
            logprobs = _logprobs(request, rounds.logprobs.ids[place], rounds.logprobs.values[place])
            possible = rounds.possible[slot, index, :proposed].tolist()
            request.take_round(
                rounds.tokens[place].tolist(), accepted, proposed, bool(done), logprobs, possible
            )


def _logprobs(
    request: Request, ids: Int[Array, "n W"], values: Float[Array, "n W"]
) -> list[dict[int, float]] | None:
    """What the request asked for of each token: its own log-probability, then the likeliest."""
    count = request.params.logprobs
    if count is None:
        return None
    columns = slice(count + 1)
    pairs = zip(ids[:, columns].tolist(), values[:, columns].tolist(), strict=True)
    return [dict(zip(*pair, strict=True)) for pair in pairs]
