"""Conversations through an engine in static batches, with the time at which tokens came."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
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
    """Compile and run once what a batch needs."""
    prompt = encode(engine, [{"role": "user", "content": conversation.turns[0]}], generation)
    engine.generate([prompt] * concurrency, generation.params(0, most=WARM_TOKENS))


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
    """Answer all turns with live history, `concurrency` requests at a time.

    All first turns come first, then all second turns, so that batches stay full. A turn whose
    history leaves no room ends its conversation; returns the records and how many turns were left
    out so. `repeat` gives the clean acceptance of a finished request.
    """
    histories: list[list[Message]] = [[] for _ in conversations]
    running = list(range(len(conversations)))
    records: list[Record] = []
    left_out, batch, turn = 0, 0, 0
    limit = engine.config.decode.max_length
    while running and turn != most_turns:
        running = [i for i in running if turn < len(conversations[i].turns)]
        prompts = {}
        for i in running:
            histories[i].append({"role": "user", "content": conversations[i].turns[turn]})
            ids = encode(engine, histories[i], generation)
            if len(ids) + generation.output_len <= limit:
                prompts[i] = ids
            else:
                skipped = len(conversations[i].turns[turn:most_turns])
                left_out += skipped
                advance(skipped)
        running = list(prompts)
        for part in _parts(running, concurrency):
            params = [generation.params(first_index + i) for i in part]
            timed = _serve(engine, [prompts[i] for i in part], params, generation.rounds_per_call)
            for i, (request, arrivals) in zip(part, timed, strict=True):
                record = _record(conversations[i], turn, batch, request, arrivals)
                if repeat:
                    record = replace(record, clean_acceptance=repeat(request))
                histories[i].append({"role": "assistant", "content": record.text})
                records.append(record)
            batch += 1
            advance(len(part))
        turn += 1
    return records, left_out


def _parts(items: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    return (items[begin : begin + size] for begin in range(0, len(items), size))


def _serve(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    rounds: int,
) -> list[tuple[Request, list[list[float]]]]:
    """One batch and when its tokens came; compilation lies before the clock starts."""
    requests = engine.prepare(prompts, params)
    arrivals: list[list[list[float]]] = [[] for _ in requests]
    begin = None
    for _ in engine.serve(requests, rounds):
        now = time.perf_counter()
        if begin is None:
            begin = now - max(request.seconds for request in requests)
        for request, seen in zip(requests, arrivals, strict=True):
            count = len(request.token_ids)
            if count > (seen[-1][1] if seen else 0):
                seen.append([now - begin, count])
    return list(zip(requests, arrivals, strict=True))


def _record(
    conversation: Conversation,
    turn: int,
    batch: int,
    request: Request,
    arrivals: list[list[float]],
) -> Record:
    result = request.result()
    fields: dict[str, Any] = {
        name: getattr(conversation, name)
        for name in ("question_id", "category", "sub_category", "subset")
    }
    return Record(
        turn=turn,
        batch=batch,
        prompt_tokens=result.prompt_tokens,
        output_tokens=len(result.token_ids),
        finish_reason=result.finish_reason,
        seed=result.seed,
        arrivals=arrivals,
        acceptance_lengths=result.acceptance_lengths,
        proposal_lengths=result.proposal_lengths,
        accepted_drafts=result.accepted_drafts,
        text=result.text,
        possible_acceptance=result.possible_acceptance,
        **fields,
    )
