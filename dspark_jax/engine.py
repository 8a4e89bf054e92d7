"""Prompts in, results out: drives the scheduler and the compiled entry points."""

from __future__ import annotations

import operator
import secrets
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from dspark_jax import metrics
from dspark_jax.config import ModelConfig, NgramConfig
from dspark_jax.decode import init_state
from dspark_jax.programs import Programs, Tier
from dspark_jax.request import Chunk, Result, SamplingParams
from dspark_jax.scheduler import Request, Scheduler
from dspark_jax.sharding import DATA, make_state
from dspark_jax.state import MAX_ROUNDS, MAX_STOP_IDS, DecodeState, FirstToken, Params, Rounds
from dspark_jax.text import TextStream, Tokenizer

STREAM_ROUNDS = 1  # rounds between two chunks of a stream
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

Prompt = str | Sequence[int]


class Engine:
    """A target, its draft (or none) and everything needed to continue prompts with them.

    `params` is {"target": ..., "draft": ...} in the dtype of `config`, placed on `mesh` where there
    is one. `stop_ids` are the model's
    own stop tokens. Without a tokenizer prompts must be ids and every text is empty. `defaults`
    apply where a call names no SamplingParams. `report` is told once when the draft's acceptance
    length stays under 1.3 over 50 rounds and more. One call at a time: a stream must be finished or
    closed before the next call (RuntimeError).
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
    ) -> None:
        if max_batch < 1:
            raise ValueError(f"max_batch must be at least 1, got {max_batch}")
        self.config = config
        self.params = params
        self.tokenizer = tokenizer
        self.stop_ids = tuple(stop_ids)
        self.max_batch = max_batch
        self.defaults = defaults or SamplingParams()
        self.mesh = mesh
        self._programs = Programs(config, params, mesh)
        self._kept: tuple[tuple[int, bool], DecodeState] | None = None  # between turns, by shape
        self._busy = False
        self._report: Callable[[str], None] | None = report if config.draft else None

    def generate(
        self,
        prompts: str | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Result]:
        """Continue prompts, in batches of at most `max_batch`; results come in prompt order.

        A prompt is a string (encoded with the tokenizer's default special tokens) or a list of
        token ids. `params` is one for all or one for each. Raises ValueError, naming the prompt,
        for an empty one, an id outside the vocabulary, or prompt + max_tokens above max_length.
        """
        requests = self.prepare([prompts] if isinstance(prompts, str) else prompts, params)
        for _ in self.serve(requests):
            pass
        return [request.result() for request in requests]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Chunk]:
        """Continue one prompt and yield what each round adds; chunks join to the result.

        Raises as `generate` does, at the call and not at the first chunk.
        """
        (request,) = self.prepare([prompt], params)
        return (request.take_chunk() for _ in self.serve([request], STREAM_ROUNDS))

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
        single = bool(messages) and isinstance(messages[0], Mapping)
        conversations: Any = [messages] if single else messages
        prompts = [self.chat_ids(one, enable_thinking) for one in conversations]
        return self.generate(prompts, params)

    def chat_ids(
        self, messages: Sequence[Mapping[str, Any]], enable_thinking: bool = False
    ) -> list[int]:
        """The token ids of a conversation's prompt."""
        tokenizer = self._tokenizer_for("chat")
        text = tokenizer.render_chat(messages, enable_thinking)
        return tokenizer.encode(text, special_tokens=False)

    def prepare(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Request]:
        """Check prompts and make the requests that `serve` takes. Raises as `generate` does."""
        if params is None or isinstance(params, SamplingParams):
            each = [params or self.defaults] * len(prompts)
        else:
            each = list(params) if isinstance(params, Sequence) else [params]
            if not all(isinstance(one, SamplingParams) for one in each):
                raise ValueError(f"params must be SamplingParams, one or one each, got {params!r}")
        if len(each) != len(prompts):
            raise ValueError(
                f"got {len(each)} SamplingParams for {len(prompts)} prompts; give one or one each"
            )
        return [
            self._request(f"prompt {index}", prompt, one)
            for index, (prompt, one) in enumerate(zip(prompts, each, strict=True))
        ]

    def serve(self, requests: Sequence[Request], rounds: int = MAX_ROUNDS) -> Iterator[None]:
        """Decode requests to their end; yields whenever some of them have gained something.

        Between two yields lie at most `rounds` rounds.
        """
        if self._busy:
            raise RuntimeError("a stream of this engine is still open; finish or close it first")
        self._busy = True
        scheduler = Scheduler(self.max_batch, requests)
        try:
            while turn := scheduler.next_turn():
                yield from self._serve_turn(turn, scheduler, rounds)
            self._judge(requests)
        finally:
            self._busy = False

    def _judge(self, requests: Sequence[Request]) -> None:
        """Say once that a draft does not fit its target: the text alone would not show it.

        Proposals that a confidence threshold cuts are short on purpose, so they are not judged.
        """
        rounds, length = metrics.rounds(requests), metrics.acceptance_length(requests)
        judged = rounds >= JUDGED_ROUNDS and not self.config.decode.confidence_threshold
        if self._report and judged and length and length < LEAST_ACCEPTANCE:
            causes = "" if isinstance(self.config.draft, NgramConfig) else NETWORK_CAUSES
            self._report(LOW_ACCEPTANCE.format(rounds=rounds, length=length) + causes)
            self._report = None

    def _serve_turn(
        self, turn: Sequence[Request], scheduler: Scheduler, rounds: int
    ) -> Iterator[None]:
        tier = Tier.of(turn, self.max_batch, self.mesh.shape[DATA] if self.mesh else 1)
        new = self._programs.compile_missing(tier)
        state = self._take_state(tier)
        if new:
            state = _all_done(self._programs.warm_up(tier, state))
        first = []
        for slot, request in enumerate(turn):
            request.start()
            state, drawn = self._programs.admit(tier, state, slot, request)
            first.append(drawn)
        for request, drawn in zip(turn, jax.device_get(first), strict=True):
            _take_first(request, drawn)
        yield
        while running := scheduler.running():
            state, out = self._programs.run_rounds(tier, state, rounds)
            for slot, request in running:
                _take_rounds(request, slot, out)
            yield
        # a row that met a stop string still runs on the device
        self._kept = (tier.batch, tier.controls), _all_done(state)

    def _take_state(self, tier: Tier) -> DecodeState:
        """The state of the turn before where it has the size; else a new one in its place.

        The engine lets go of it: after an error or a stream that was not finished it is gone.
        """
        kept, self._kept = self._kept, None
        if kept is not None and kept[0] == (tier.batch, tier.controls):
            return kept[1]
        del kept  # its memory must be free before the new one takes its own
        build = partial(init_state, tier.configure(self.config), tier.batch)
        return make_state(build, self.mesh)

    def _request(self, name: str, prompt: Prompt, params: SamplingParams) -> Request:
        ids = self._encode(name, prompt)
        limit, total = self.config.decode.max_length, len(ids) + params.max_tokens
        if total > limit:
            raise ValueError(
                f"{name} has {len(ids)} tokens, with max_tokens {params.max_tokens} that makes"
                f" {total}, above max_length {limit}; shorten it, lower max_tokens or load with a"
                " larger max_length"
            )
        stop_ids = set(params.stop_token_ids) | set(() if params.ignore_eos else self.stop_ids)
        if len(stop_ids) > MAX_STOP_IDS:
            raise ValueError(f"{len(stop_ids)} stop tokens are above the limit of {MAX_STOP_IDS}")
        if params.stop:
            self._tokenizer_for("stop strings")
        size = self.config.target.vocab_size
        for option, named in (
            ("logit_bias", tuple(dict(params.logit_bias or ()))),
            ("stop_token_ids", tuple(params.stop_token_ids)),
        ):
            if max(named, default=0) >= size:
                raise ValueError(
                    f"{option} names id {max(named)}, outside the vocabulary of {size}"
                )
        return Request(
            prompt_ids=ids,
            params=params,
            seed=secrets.randbits(64) if params.seed is None else params.seed,
            stop_ids=sorted(stop_ids),
            text=TextStream(self.tokenizer, params.stop),
        )

    def _encode(self, name: str, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            ids = self._tokenizer_for("a prompt of text").encode(prompt)
        else:
            try:
                ids = [operator.index(token) for token in prompt]
            except TypeError:
                raise ValueError(
                    f"{name} must be a string or a list of token ids, got {prompt!r}"
                ) from None
        if not ids:
            raise ValueError(f"{name} is empty; give at least one token")
        size = self.config.target.vocab_size
        outside = next((token for token in ids if not 0 <= token < size), None)
        if outside is not None:
            raise ValueError(f"{name} holds id {outside}, outside the vocabulary of {size}")
        return ids

    def _tokenizer_for(self, purpose: str) -> Tokenizer:
        if self.tokenizer is None:
            raise ValueError(
                f"{purpose} needs a tokenizer, and the checkpoint has none; give token ids"
            )
        return self.tokenizer


def _all_done(state: DecodeState) -> DecodeState:
    return replace(state, done=jnp.ones_like(state.done))


def _take_first(request: Request, first: FirstToken) -> None:
    logprobs = _logprobs(request, first.logprobs.ids[None], first.logprobs.values[None])
    request.take_first(int(first.token), logprobs)


def _take_rounds(request: Request, slot: int, rounds: Rounds) -> None:
    """Hand one row's rounds to its request; those that did not run have zero counts."""
    for index, (emitted, accepted, proposed, done) in enumerate(rounds.counts[slot].tolist()):
        if emitted and request.finish_reason is None:
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
