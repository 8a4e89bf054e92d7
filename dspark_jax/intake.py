"""Prompts and settings as callers give them: checked, and turned into requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dspark_jax.accounting import Request
from dspark_jax.hosts import seed_source
from dspark_jax.request import SamplingParams, integer, items
from dspark_jax.state import MAX_STOP_IDS
from dspark_jax.text import TextStream, Tokenizer

Prompt = str | Sequence[int]


class Intake:
    """Makes requests of prompts, or says in one sentence (ValueError) why one cannot be served."""

    def __init__(
        self,
        vocab_size: int,
        max_length: int,
        tokenizer: Tokenizer | None,
        stop_ids: Sequence[int],
    ) -> None:
        self.vocab_size = vocab_size
        self.max_length = max_length
        self.tokenizer = tokenizer
        self.stop_ids = tuple(stop_ids)
        self._draw_seed = seed_source()

    def requests(
        self, prompts: str | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams]
    ) -> list[Request]:
        """A request for each prompt; `params` is one for all or one for each."""
        kind = "a string or a list of prompts"
        prompts = [prompts] if isinstance(prompts, str) else items("prompts", prompts, kind)
        each = settings(params)
        if isinstance(params, SamplingParams):
            each *= len(prompts)
        if len(each) != len(prompts):
            raise ValueError(
                f"got {len(each)} SamplingParams for {len(prompts)} prompts; give one or one each"
            )
        return [
            self.request(f"prompt {index}", prompt, one)
            for index, (prompt, one) in enumerate(zip(prompts, each, strict=True))
        ]

    def request(self, name: str, prompt: Prompt, params: SamplingParams) -> Request:
        """A request for the prompt that errors call `name`."""
        ids = self._encode(name, prompt)
        limit, total = self.max_length, len(ids) + params.max_tokens
        if total > limit:
            raise ValueError(
                f"{name} has {len(ids)} tokens, with max_tokens {params.max_tokens} that makes"
                f" {total}, above max_length {limit}; shorten it, lower max_tokens or raise"
                " max_length"
            )
        stop_ids = set(params.stop_token_ids) | set(() if params.ignore_eos else self.stop_ids)
        if len(stop_ids) > MAX_STOP_IDS:
            raise ValueError(f"{len(stop_ids)} stop tokens are above the limit of {MAX_STOP_IDS}")
        if params.stop:
            self.tokenizer_for("stop strings")
        size = self.vocab_size
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
            seed=self._draw_seed() if params.seed is None else params.seed,
            stop_ids=sorted(stop_ids),
            text=TextStream(self.tokenizer, params.stop),
        )

    def _encode(self, name: str, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            ids = self.tokenizer_for("a prompt of text").encode(prompt)
        else:
            kind = "a string or a list of token ids"
            try:
                ids = [integer("a token id", token) for token in items(name, prompt, kind)]
            except ValueError:
                raise ValueError(f"{name} must be {kind}, got {prompt!r}") from None
        if not ids:
            raise ValueError(f"{name} is empty; give at least one token")
        size = self.vocab_size
        outside = next((token for token in ids if not 0 <= token < size), None)
        if outside is not None:
            raise ValueError(f"{name} holds id {outside}, outside the vocabulary of {size}")
        return ids

    def tokenizer_for(self, purpose: str) -> Tokenizer:
        """The tokenizer; without one, an error that names the purpose."""
        if self.tokenizer is None:
            raise ValueError(
                f"{purpose} needs a tokenizer, and the checkpoint has none; give token ids"
            )
        return self.tokenizer


def settings(params: Any) -> list[SamplingParams]:
    """One SamplingParams or several, as a list; ValueError for anything else."""
    several = isinstance(params, Sequence) and not isinstance(params, str)
    each = list(params) if several else [params]
    if not all(isinstance(one, SamplingParams) for one in each):
        raise ValueError(f"params must be SamplingParams, one or one each, got {params!r}")
    return each
