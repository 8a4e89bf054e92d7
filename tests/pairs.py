"""Checkpoint folders as the jitted entry points take them, and a look inside those."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from convert.apply import load_draft_params, load_target_params
from convert.packaging import DraftOverrides, read_draft, read_target, share_with_target
from dspark_jax import draft, target
from dspark_jax.config import DecodeConfig, ModelConfig

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


def relative_error(actual: Any, expected: np.ndarray) -> float:
    """Largest difference over the largest magnitude of the expected tensor."""
    actual = np.asarray(actual)
    assert actual.shape == expected.shape, f"{actual.shape} is not {expected.shape}"
    return float(np.abs(actual - expected).max() / np.abs(expected).max())
