"""Tiny models with random weights and a driver of the jitted entry points without the engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax import decode
from dspark_jax.config import (
    DecodeConfig,
    DraftConfig,
    LayersConfig,
    ModelConfig,
    RopeConfig,
    TargetConfig,
)
from dspark_jax.draft import Draft
from dspark_jax.layers import abstract_params, rms_norm
from dspark_jax.request import SamplingParams
from dspark_jax.rows import row_settings
from dspark_jax.state import MAX_ROUNDS, RowSettings
from dspark_jax.target import Target


@contextmanager
def quick_compilation() -> Iterator[None]:
    """Compile with few optimisations: for tiny models compiling takes nearly all of the time."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def tiny_layers(**changes: Any) -> LayersConfig:
    shape = LayersConfig(
        hidden_size=12,
        intermediate_size=20,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=6,
        rope=RopeConfig(theta=100.0),
    )
    return replace(shape, **({"windows": ()} | changes))


def tiny_config(
    *,
    vocab: int = 61,
    block: int = 4,
    markov: str = "vanilla",
    confidence: str = "markov",
    draft: dict[str, Any] | None = None,
    **decoding: Any,
) -> ModelConfig:
    """A target of 2 layers with a draft of 1; `draft` and `decoding` change single fields."""
    target = TargetConfig(layers=tiny_layers(), vocab_size=vocab, max_length=512)
    fields: dict[str, Any] = {
        "layers": tiny_layers(num_layers=1),
        "vocab_size": vocab,
        "draft_vocab_size": vocab,
        "block_size": block,
        "mask_token_id": vocab - 1,
        "taps": (-1, 0),
        "target_hidden_size": 12,
        "markov": markov,
        "markov_rank": 12 if markov != "none" else 0,
        "confidence": "hidden" if markov == "none" and confidence == "markov" else confidence,
    }
    network = DraftConfig(**(fields | (draft or {})))
    settings = {"max_length": 64, "prefill_chunk": 8, "num_drafts": network.max_drafts}
    return ModelConfig(target, network, DecodeConfig(**(settings | decoding)))


def plain_config(config: ModelConfig) -> ModelConfig:
    """The same target without a draft."""
    return replace(
        config,
        draft=None,
        decode=replace(
            config.decode, num_drafts=0, confidence_threshold=0.0, costs=(), temperatures=()
        ),
    )


def decoding(config: ModelConfig, **changes: Any) -> ModelConfig:
    return replace(config, decode=replace(config.decode, **changes))


def random_params(config: ModelConfig, seed: int = 0, scale: float = 0.5) -> dict[str, Any]:
    """Random weights of the right shapes; norms near one, heads wide enough for uneven laws."""
    rng = np.random.default_rng(seed)

    def fill(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        name = jax.tree_util.keystr(path)
        if "draft_to_target" in name:
            ids = rng.permutation(config.target.vocab_size)[: leaf.shape[0]]
            return jnp.asarray(np.sort(ids), leaf.dtype)
        values = rng.normal(size=leaf.shape) * scale
        if "norm" in name:
            values = 1 + 0.2 * values
        return jnp.asarray(values, leaf.dtype)

    shapes = {"target": abstract_params(Target, config.target, config.dtype)}
    if config.draft:
        shapes["draft"] = abstract_params(Draft, config.draft, config.dtype)
    return jax.tree_util.tree_map_with_path(fill, shapes)


def agreeing_params(config: ModelConfig, seed: int = 0) -> dict[str, Any]:
    """Random weights with a vanilla head that mostly drafts what a nearly bigram target says."""
    params = random_params(config, seed)
    target, draft = params["target"], params["draft"]
    for layer in target["layers"].values():
        for weight in (layer["self_attn"]["o_proj"], layer["mlp"]["down_proj"]):
            weight["weight"] *= 0.03
    embedded = target["embed_tokens"]["weight"]
    eps = config.target.layers.norm_eps
    draft["markov_head"]["markov_w1"]["weight"] = rms_norm(embedded, target["norm"]["weight"], eps)
    draft["markov_head"]["markov_w2"]["weight"] = target["lm_head"]["weight"]
    draft["norm"]["weight"] *= 0.03
    return params


@dataclass(frozen=True)
class Request:
    prompt: Sequence[int]
    max_tokens: int = 16
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    stop_ids: Sequence[int] = ()

    def settings(self) -> RowSettings:
        params = SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
        )
        return row_settings(len(self.prompt), params, seed=self.seed, stop_ids=self.stop_ids)


@dataclass
class Decoded:
    """Output tokens (cut at max_tokens) and one entry a round."""

    tokens: list[int] = field(default_factory=list)
    acceptance_lengths: list[int] = field(default_factory=list)
    proposal_lengths: list[int] = field(default_factory=list)


def start(
    config: ModelConfig, params: Any, state: Any, slot: int, request: Request
) -> tuple[Any, int]:
    """Admit a request and prefill its prompt; returns the state and the first token.

    What only concerns rounds is neutral here, so that fewer programs are compiled.
    """
    config = decoding(
        config, rejection="token", confidence_threshold=0.0, draft_top_k=0, sampled=True
    )
    state = decode.admit(config, state, jnp.int32(slot), request.settings())
    chunk = config.decode.prefill_chunk
    first = None
    for begin in range(0, len(request.prompt), chunk):
        ids = np.zeros(chunk, np.int32)
        part = request.prompt[begin : begin + chunk]
        ids[: len(part)] = part
        state, first = decode.prefill(
            config,
            params,
            state,
            jnp.int32(slot),
            jnp.asarray(ids),
            jnp.int32(len(part)),
            jnp.bool_(begin + chunk >= len(request.prompt)),
        )
    return state, int(first.token)


def one_round(config: ModelConfig, params: Any, state: Any) -> tuple[Any, Any, Any]:
    """State, tokens [B, 1, T] and counts [B, 1, 4] of a single jitted round."""
    state, output = decode.decode_round(config, params, state)
    return state, output.tokens[:, None], output.counts[:, None]


def many_rounds(
    config: ModelConfig, params: Any, state: Any, rounds: int = MAX_ROUNDS
) -> tuple[Any, Any, Any]:
    """The same for up to `rounds` rounds in one call."""
    state, output = decode.decode_rounds(config, params, state, jnp.int32(rounds))
    return state, output.tokens, output.counts


def run(
    config: ModelConfig,
    params: Any,
    requests: Sequence[Request],
    *,
    slots: Sequence[int] | None = None,
    batch: int | None = None,
    state: Any = None,
    advance: Any = many_rounds,
) -> tuple[list[Decoded], Any]:
    """Decode all requests together, each in its slot; returns them and the final state."""
    slots = list(slots or range(len(requests)))
    state = decode.init_state(config, batch or len(requests)) if state is None else state
    results = []
    for slot, request in zip(slots, requests, strict=True):
        state, first = start(config, params, state, slot, request)
        results.append(Decoded([first]))
    while not bool(state.done.all()):
        state, tokens, counts = advance(config, params, state)
        tokens, counts = np.asarray(tokens), np.asarray(counts)
        for result, slot in zip(results, slots, strict=True):
            for row, (emitted, _, proposed, _) in zip(tokens[slot], counts[slot], strict=True):
                if emitted:
                    result.tokens += row[:emitted].tolist()
                    result.acceptance_lengths.append(int(emitted))
                    result.proposal_lengths.append(int(proposed))
    for result, request in zip(results, requests, strict=True):
        del result.tokens[request.max_tokens :]
    return results, state


def run_alone(config: ModelConfig, params: Any, request: Request, **options: Any) -> Decoded:
    return run(config, params, [request], **options)[0][0]


run_round_by_round = partial(run, advance=one_round)
