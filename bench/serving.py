"""Conversations through an engine, so many at a time, with the time at which tokens came."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from bench.datasets import Conversation
from bench.records import Record
from dspark_jax.accounting import Request
from dspark_jax.engine import Engine
from dspark_jax.request import SamplingParams
from dspark_jax.text import has_chat_template

WARM_TOKENS = 4
Message = dict[str, str]


@dataclass(frozen=True)
class Generation:
    """How every prompt is continued. Request i draws from seed + i (as DeepSpec's evaluator)."""

    output_len: int
    temperature: float
    seed: int = 0
    ignore_eos: bool = False
    chat_template: bool = True  # where the tokenizer has one
    enable_thinking: bool = False
    rounds_per_call: int = 1  # between two looks of the host

    def params(self, index: int, most: int | None = None) -> SamplingParams:
        """The sampling of request `index`."""
        return SamplingParams(
            max_tokens=min(self.output_len, most or self.output_len),
            temperature=self.temperature,
            seed=self.seed + index,
            ignore_eos=self.ignore_eos,
        )


def encode(engine: Engine, messages: Sequence[Message], generation: Generation) -> list[int]:
    """Ids of a conversation so far: through the chat template, else its texts by empty lines."""
    tokenizer = engine.tokenizer
    if tokenizer is None:
        raise ValueError("the target has no tokenizer, so prompts of text cannot be encoded")
    if generation.chat_template and has_chat_template(tokenizer.folder):
        return engine.chat_ids(messages, generation.enable_thinking)
    return tokenizer.encode("\n\n".join(message["content"] for message in messages))


def fitting(
    engine: Engine, conversations: Sequence[Conversation], generation: Generation, drop: bool
) -> list[Conversation]:
    """The conversations whose first turn and its answer fit `max_length`.

    Raises ValueError for one that does not, unless told to drop it, and when none is left.
    """
    limit = engine.config.decode.max_length
    sizes = [
        len(encode(engine, [{"role": "user", "content": one.turns[0]}], generation))
        + generation.output_len
        for one in conversations
    ]
    if max(sizes, default=0) > limit and not drop:
        place = sizes.index(max(sizes))
        raise ValueError(
            f"prompt {conversations[place].question_id} with its output takes {sizes[place]}"
            f" tokens, above max_length {limit}; give --max-length {sizes[place]} where the model"
            " allows it, a lower --output-len, or --drop-long to leave such prompts out"
        )
    kept = [one for one, size in zip(conversations, sizes, strict=True) if size <= limit]
    if not kept:
        raise ValueError("no prompt is left to measure on; choose others")
    return kept


def warm_up(
    engine: Engine, conversation: Conversation, generation: Generation, concurrency: int
) -> None:
    """Compile and run once what so many requests at once need."""
    prompt = encode(engine, [{"role": "user", "content": conversation.turns[0]}], generation)
    engine.generate([prompt] * concurrency, generation.params(0, most=WARM_TOKENS))


@dataclass
class Turn:
    """One turn of a conversation on its way: when it was sent, and when its tokens came.

    `arrivals` holds (seconds since it was sent, tokens by then) for each output.
    """

    conversation: int
    number: int
    sent: float = 0.0
    arrivals: list[tuple[float, int]] = field(default_factory=list)

    def note(self, now: float, tokens: int) -> None:
        """Note an output that brought something."""
        if tokens > (self.arrivals[-1][1] if self.arrivals else 0):
            self.arrivals.append((now - self.sent, tokens))


class Talks:
    """Conversations with their live histories, and the turns that are still to be answered.

    All first turns come first, then the second ones as the first are answered.
    """

    def __init__(
        self,
        engine: Engine,
        conversations: Sequence[Conversation],
        generation: Generation,
        most_turns: int | None,
    ) -> None:
        self.left_out = 0  # turns whose history leaves no room, and those after them
        self._engine, self._generation = engine, generation
        self._turns = [one.turns[:most_turns] for one in conversations]
        self._histories: list[list[Message]] = [[] for _ in conversations]
        self._ready: deque[tuple[Turn, list[int]]] = deque()
        for index in range(len(conversations)):
            self._add(Turn(index, 0))

    def next(self) -> tuple[Turn, list[int]] | None:
        """The next turn and its prompt; None where none is ready."""
        return self._ready.popleft() if self._ready else None

    def answered(self, turn: Turn, text: str) -> None:
        """Go on with the conversation."""
        self._histories[turn.conversation].append({"role": "assistant", "content": text})
        self._add(Turn(turn.conversation, turn.number + 1))

    def _add(self, turn: Turn) -> None:
        texts = self._turns[turn.conversation]
        if turn.number == len(texts):
            return
        history = self._histories[turn.conversation]
        history.append({"role": "user", "content": texts[turn.number]})
        ids = encode(self._engine, history, self._generation)
        if len(ids) + self._generation.output_len <= self._engine.config.decode.max_length:
            self._ready.append((turn, ids))
        else:
            self.left_out += len(texts) - turn.number


def answer(
    engine: Engine,
    conversations: Sequence[Conversation],
    generation: Generation,
    concurrency: int,
    *,
    first_index: int = 0,
    most_turns: int | None = None,
    advance: Callable[[int], None] = lambda count: None,
    repeat: Callable[[Request], list[list[float]]] | None = None,
) -> tuple[list[Record], int]:
    """Answer all turns with live history; when one of `concurrency` requests ends, the next is
    sent.

    Returns the records, in the order of turns and conversations, and how many turns were left out
    because their history leaves no room. `repeat` gives the clean acceptance of a finished
    request. Compilation is not counted.
    """
    talks = Talks(engine, conversations, generation, most_turns)
    advance(talks.left_out)
    running: dict[Request, Turn] = {}
    found: list[tuple[Turn, Record]] = []
    begin = engine.clock()
    try:
        while True:
            while len(running) < concurrency and (ready := talks.next()):
                turn, prompt = ready
                turn.sent = engine.clock()
                params = generation.params(first_index + turn.conversation)
                rounds = generation.rounds_per_call
                running[engine.submit(prompt, params, rounds=rounds)] = turn
            if not running:
                break
            changed = engine.step()
            now = engine.clock()
            for request in (one for one in changed if one in running):
                running[request].note(now, len(request.token_ids))
                if request.finish_reason:
                    turn, skipped = running.pop(request), talks.left_out
                    record = record_of(conversations[turn.conversation], turn, request, begin)
                    if repeat:
                        record = replace(record, clean_acceptance=repeat(request))
                    found.append((turn, record))
                    talks.answered(turn, record.text)
                    advance(1 + talks.left_out - skipped)
    finally:
        for request in running:
            engine.cancel(request)
    found.sort(key=lambda pair: (pair[0].number, pair[0].conversation))
    return [record for _, record in found], talks.left_out


def record_of(conversation: Conversation, turn: Turn, request: Request, begin: float) -> Record:
    """The record of a finished turn; the first of its batch was sent at `begin`."""
    result = request.result()
    fields: dict[str, Any] = {
        name: getattr(conversation, name)
        for name in ("question_id", "category", "sub_category", "subset")
    }
    return Record(
        turn=turn.number,
        sent=turn.sent - begin,
        prompt_tokens=result.prompt_tokens,
        output_tokens=len(result.token_ids),
        finish_reason=result.finish_reason,
        seed=result.seed,
        arrivals=turn.arrivals,
        acceptance_lengths=result.acceptance_lengths,
        proposal_lengths=result.proposal_lengths,
        accepted_drafts=result.accepted_drafts,
        text=result.text,
        possible_acceptance=result.possible_acceptance,
        **fields,
    )
