"""PyTorch peers as lines of a comparison: the same weights and prompts, greedy, one request.

Requests are made and counted by this package's own accounting, so that stop tokens, output length
and text are the engine's. On a GPU the arrays of the target are held twice.
"""

from __future__ import annotations

import argparse
import inspect
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel, StaticCache
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

from bench.datasets import Conversation
from bench.entries import Entry
from bench.pairs import EMBEDDED_DRAFT, NONE, short_name, target_of
from bench.records import Record
from bench.serving import Generation, Turn, encode, record_of
from bench.torch_peers import SETTLING, Decoder, Draft, build_draft
from bench.torch_rules import loop_lacks
from convert.hub import resolve_folder
from convert.sources import open_folder
from dspark_jax.accounting import Request
from dspark_jax.config import DraftConfig
from dspark_jax.engine import Engine
from dspark_jax.generate import tell
from dspark_jax.loading import EMBEDDED

LOOP = "eager PyTorch DSpark"
LEAST_TOKENS = 2  # a round ends a request, so there is one, as in the engine
Arrived = Callable[[], None]


@dataclass(kw_only=True)
class TorchEntry(Entry):
    """A network of PyTorch; `engine` encodes prompts, makes requests and decodes text."""

    engine: Engine
    target: PreTrainedModel

    @abstractmethod
    def decode(self, request: Request, arrived: Arrived) -> None:
        """Decode a request to its end; `arrived` is called when it has got something."""

    def warm_up(
        self, conversations: Sequence[Conversation], generation: Generation, concurrency: int
    ) -> None:
        """Decode some tokens after the longest prompt."""
        longest = max((self.prompt(one, generation) for one in conversations), key=len)
        self.decode(self.request(longest, generation, 0, SETTLING), lambda: None)

    def answer(
        self,
        conversations: Sequence[Conversation],
        generation: Generation,
        concurrency: int,
        first_index: int,
    ) -> list[Record]:
        prompts = [self.prompt(one, generation) for one in conversations]
        records = []
        begin = time.perf_counter()
        for index, (conversation, prompt) in enumerate(zip(conversations, prompts, strict=True)):
            turn = Turn(index, 0, sent=time.perf_counter())
            request = self.request(prompt, generation, first_index + index)

            def arrived(turn: Turn = turn, request: Request = request) -> None:
                turn.note(time.perf_counter(), len(request.token_ids))

            self.decode(request, arrived)
            records.append(record_of(conversation, turn, request, begin))
        return records

    def prompt(self, conversation: Conversation, generation: Generation) -> list[int]:
        """Ids of the first turn."""
        message = {"role": "user", "content": conversation.turns[0]}
        return encode(self.engine, [message], generation)

    def request(
        self, prompt: list[int], generation: Generation, index: int, most: int | None = None
    ) -> Request:
        """A request that begins now."""
        (request,) = self.engine.prepare([prompt], generation.params(index, most))
        request.start()
        return request


@dataclass(kw_only=True)
class TransformersEntry(TorchEntry):
    """The target alone: `generate`, which compiles a step with a static cache on a GPU.

    One cache serves all requests: a step is compiled and captured for its size and its address.
    """

    cache: StaticCache | None = field(default=None, init=False)

    def warm_up(
        self, conversations: Sequence[Conversation], generation: Generation, concurrency: int
    ) -> None:
        """Make the cache for the longest prompt and its output, then decode some tokens."""
        longest = max(len(self.prompt(one, generation)) for one in conversations)
        rows = longest + max(generation.output_len, LEAST_TOKENS)
        self.cache = StaticCache(config=self.target.config, max_cache_len=rows)
        super().warm_up(conversations, generation, concurrency)

    def decode(self, request: Request, arrived: Arrived) -> None:
        assert self.cache is not None, "warm up first"
        self.cache.reset()
        ids = torch.tensor([request.prompt_ids], device=self.target.device)
        settings = GenerationConfig(
            do_sample=False,
            max_new_tokens=max(request.params.max_tokens, LEAST_TOKENS),
            eos_token_id=list(request.stop_ids) or None,
            pad_token_id=0,
        )
        generate: Any = self.target.generate  # torch types an attribute of a module as a tensor
        generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=settings,
            streamer=Handover(request, arrived),
            **{cache_keyword(self.target): self.cache},
        )


def cache_keyword(model: PreTrainedModel) -> str:
    """What `model` calls its cache: transformers renames it within version 5."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


class Handover(BaseStreamer):
    """Hands tokens to a request as they come: the first is prefill's, each other one a step."""

    def __init__(self, request: Request, arrived: Arrived) -> None:
        self.request, self.arrived, self.prompt = request, arrived, True

    def put(self, value: Tensor) -> None:
        """Take the prompt, which comes first, or a token."""
        request = self.request
        if self.prompt:
            self.prompt = False
            return
        if request.token_ids:
            done = len(request.token_ids) + 1 >= request.params.max_tokens
            request.take_round([int(value)], 0, 0, done)
        else:
            request.take_first(int(value))
        self.arrived()

    def end(self) -> None:
        """All has been handed over."""


@dataclass(kw_only=True)
class LoopEntry(TorchEntry):
    """DSpark as the published evaluator runs it: eager, reading every round on the host."""

    network: Draft

    def decode(self, request: Request, arrived: Arrived) -> None:
        ids = torch.tensor(request.prompt_ids, device=self.target.device)
        decoder = Decoder(self.target, self.network, ids)
        request.take_first(int(decoder.anchor))
        arrived()
        while request.finish_reason is None:
            take_round(request, decoder.round(), self.num_drafts)
            arrived()


def take_round(request: Request, emitted: list[int], proposed: int) -> None:
    """Hand over a round of accepted drafts and a token of the target, counted as the engine does.

    A stop token among the drafts ends it: those after it count as not proposed (DeepSpec).
    """
    accepted = len(emitted) - 1
    for place, token in enumerate(emitted[:accepted], 1):
        if token in request.stop_ids:
            emitted, accepted, proposed = emitted[:place], place, place
            break
    reached = sum(request.acceptance_lengths) + len(emitted)
    request.take_round(emitted, accepted, proposed, reached >= request.params.max_tokens)


def load_target(folder: Path, dtype: str, device: str) -> PreTrainedModel:
    """The target as transformers reads it."""
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), local_files_only=True
    )
    model.generation_config = GenerationConfig()  # no sampling defaults of the checkpoint
    move: Any = model.to  # its decorator hides what it takes
    return move(device).eval()


def load_draft(folder: Path, config: DraftConfig, dtype: str, device: str) -> Draft:
    """The draft from its safetensors; copies of the target's embedding and head are passed by."""
    network, tensors = build_draft(config, dtype, device), open_folder(folder, "draft").named
    for name, weight in network.named_parameters():
        with safe_open(tensors[name].file, framework="pt") as file:
            # A file may pad the rows of the vocabulary.
            weight.data.copy_(file.get_tensor(tensors[name].name)[: len(weight)])
    return network


def torch_entries(
    options: argparse.Namespace, names: Sequence[str], engines: Sequence[Engine]
) -> list[Entry]:
    """The peers of the named drafts: transformers, and the loop for each draft that it can run.

    A note on standard error says why it runs none.
    """
    device, dtype = "cuda" if torch.cuda.is_available() else "cpu", engines[0].config.dtype
    folder = resolve_folder(target_of(options))
    target = load_target(folder, dtype, device)
    entries: list[Entry] = [
        TransformersEntry(
            name="transformers", draft=NONE, num_drafts=0, engine=engines[0], target=target
        )
    ]
    fitting, reasons = [], []
    for name, engine in zip(names, engines, strict=True):
        reason = loop_lacks(engine.config.draft)
        if not reason:
            fitting.append((name, engine))
        elif name != NONE:
            reasons.append(f"{name} {reason}")
    for name, engine in fitting:
        config = engine.config.draft_network
        assert config is not None  # else it would lack something
        place = EMBEDDED / "draft" if name == EMBEDDED_DRAFT else resolve_folder(name)
        entries.append(
            LoopEntry(
                name=LOOP if len(fitting) == 1 else f"{LOOP} {short_name(name)}",
                draft=f"{name} (PyTorch)",
                num_drafts=config.max_drafts,
                engine=engine,
                target=target,
                network=load_draft(place, config, dtype, device),
            )
        )
    if reasons or not fitting:
        tell(f"note: {LOOP} is left out: {'; '.join(reasons) or 'no draft is named'}")
    if fitting and (options.num_speculative_tokens or options.confidence_threshold):
        tell(f"note: {LOOP} drafts the trained block and verifies all of it")
    return entries


def torch_environment() -> str:
    """The software and the device of the peers."""
    threads = f"CPU with {torch.get_num_threads()} threads"  # they wait for each other
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else threads
    return f"torch {torch.__version__} on {device}, transformers {transformers.__version__}"
