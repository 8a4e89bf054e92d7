"""Checkpoint folders as the jitted entry points take them, and a look inside those."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from convert.apply import load_draft_params, load_target_params
from convert.packaging import DraftOverrides, read_draft, read_target, share_with_target
from dspark_jax import decode, draft, target
from dspark_jax.config import DecodeConfig, ModelConfig
from tests.tiny import Decoded, Request

HERE = Path(__file__).parent
DEMO = HERE.parent / "dspark_jax" / "demo"
GOLDEN = HERE / "golden"
CASES = sorted(folder.name for folder in GOLDEN.iterdir() if folder.is_dir())


def load_pair(
    folder: Path, *, overrides: DraftOverrides | None = None, plain: bool = False, **decoding: Any
) -> tuple[ModelConfig, dict[str, Any]]:
    """Read folder/target and folder/draft in float32; `decoding` sets fields of DecodeConfig."""
    source = read_target(folder / "target")
    params = {"target": load_target_params(source, "float32")}
    settings = {"max_length": source.config.max_length} | decoding
    if plain:
        return ModelConfig(source.config, None, DecodeConfig(**settings)), params
    drafted = share_with_target(read_draft(folder / "draft", source, overrides), source)
    params["draft"] = load_draft_params(drafted, "float32")
    settings = {"num_drafts": drafted.config.max_drafts} | settings
    return ModelConfig(source.config, drafted.config, DecodeConfig(**settings)), params


def observed(step: Callable[..., Any], patch: Any) -> Callable[..., Any]:
    """A jitted copy of an entry point that also returns what its networks computed.

    Keys: `target_logits` and `tapped` of all rows of a target pass; `context` of a batch of
    context rows; `hidden`, `base` and `logits` of the block positions that are sampled.
    """
    seen: dict[str, Any] = {}
    call, context_rows, walk = target.Target.__call__, draft.Draft.context_rows, draft.walk

    def watched_target(self: Any, *args: Any) -> Any:
        hidden, tapped, cache = call(self, *args)
        seen.update(target_logits=self.logits(hidden), tapped=tapped)
        return hidden, tapped, cache

    def watched_context(self: Any, features: Any) -> Any:
        seen["context"] = context_rows(self, features)
        return seen["context"]

    def watched_walk(head: Any, base: Any, hidden: Any, *args: Any) -> Any:
        tokens, laws, logits = walk(head, base, hidden, *args)
        seen.update(base=base, hidden=hidden, logits=logits)
        return tokens, laws, logits

    def run(*args: Any) -> Any:
        seen.clear()
        with patch.context() as watching:
            watching.setattr(target.Target, "__call__", watched_target)
            watching.setattr(draft.Draft, "context_rows", watched_context)
            watching.setattr(draft, "walk", watched_walk)
            result = step.__wrapped__(*args)
        return result, dict(seen)

    return jax.jit(run, static_argnums=0)


@dataclass
class ObservedRound:
    """Where the anchor stood, and the tensors and tokens of one draft step."""

    start: int
    anchor: int
    tensors: dict[str, np.ndarray]
    tokens: list[int]


@dataclass
class ObservedRun:
    """`target_logits`, `tapped` and `context` of the prompt, each round, and what came out."""

    prompt: dict[str, np.ndarray]
    rounds: list[ObservedRound]
    decoded: Decoded


def observe_run(config: ModelConfig, params: Any, request: Request, patch: Any) -> ObservedRun:
    """Decode one request alone through `prefill`, `draft_step` and `verify_step`, watching."""
    state = decode.init_state(config, 1)
    state = decode.admit(config, state, jnp.int32(0), request.settings())
    prefill, chunks, first = observed(decode.prefill, patch), [], None
    size = config.decode.prefill_chunk
    for begin in range(0, len(request.prompt), size):
        part = np.asarray(request.prompt[begin : begin + size], np.int32)
        ids = jnp.asarray(np.pad(part, (0, size - len(part))))
        last = jnp.bool_(begin + size >= len(request.prompt))
        chunk = (jnp.int32(0), ids, jnp.int32(len(part)), last)
        (state, first), seen = prefill(config, params, state, *chunk)
        chunks.append({name: x[0, : len(part)] for name, x in seen.items()})
    prompt = {name: np.concatenate([c[name] for c in chunks]) for name in chunks[0]}
    run = ObservedRun(prompt, [], Decoded([int(first.token)]))
    step = observed(decode.draft_step, patch)
    while not bool(state.done[0]):
        start, anchor, waiting = (
            int(x[0]) for x in (state.cached, state.anchor, state.context_len)
        )
        (state, proposal), seen = step(config, params, state)
        tensors = {name: np.asarray(x[0]) for name, x in seen.items()}
        tensors["context"] = tensors["context"][:waiting] if run.rounds else prompt["context"]
        if proposal.confidence.shape[1]:
            tensors["confidence"] = np.asarray(proposal.confidence[0])
        run.rounds.append(ObservedRound(start, anchor, tensors, proposal.tokens[0].tolist()))
        state, output = decode.verify_step(config, params, state, proposal)
        emitted, _, proposed, _ = output.counts[0].tolist()
        run.decoded.tokens += output.tokens[0, :emitted].tolist()
        run.decoded.acceptance_lengths.append(emitted)
        run.decoded.proposal_lengths.append(proposed)
    del run.decoded.tokens[request.max_tokens :]
    return run


def relative_error(actual: Any, expected: np.ndarray) -> float:
    """Largest difference over the largest magnitude of the expected tensor."""
    actual = np.asarray(actual)
    assert actual.shape == expected.shape, f"{actual.shape} is not {expected.shape}"
    return float(np.abs(actual - expected).max() / np.abs(expected).max())
