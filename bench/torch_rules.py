"""What the PyTorch peers can run, told without importing torch, which takes seconds."""

from __future__ import annotations

import argparse
import os
from importlib.util import find_spec

from bench.pairs import target_of
from convert.hub import resolve_folder
from convert.packaging import read_target
from convert.store import is_store
from dspark_jax.config import GREEDY_TEMPERATURE, DraftConfig, LayersConfig, NgramConfig


def share_memory() -> None:
    """Leave PyTorch half of a device's memory; jax reads this when it first meets the device.

    The other half is reserved, as jax reserves memory wherever it runs alone.
    """
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")


def is_qwen3(layers: LayersConfig) -> bool:
    """Whether layers are Qwen3's: norms on q and k, no bias, no window."""
    return layers.qk_norm and not (layers.qkv_bias or layers.output_bias or any(layers.windows))


def loop_lacks(draft: DraftConfig | NgramConfig | None) -> str:
    """Why the eager DSpark loop cannot run a draft; empty where it can."""
    if not isinstance(draft, DraftConfig):
        return "is no network"
    reasons = {
        "lacks a vanilla Markov head": draft.markov != "vanilla",
        "does not draft from the anchor": not draft.sample_from_anchor,
        "is causal inside its block": any(draft.causal),
        "has an embedding or a head of its own": draft.own_embedding or draft.own_head,
        "has layers that are not Qwen3's": not is_qwen3(draft.layers),
        "has scaled rotary embeddings": draft.layers.rope.kind != "default",
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def check_torch(options: argparse.Namespace) -> None:
    """Refuse what the peers cannot do beside this package, before any weight is read."""
    if options.temperature >= GREEDY_TEMPERATURE:
        raise ValueError("--torch compares greedy decoding alone; add --temperature 0")
    if options.max_concurrency > 1:
        raise ValueError("--torch answers one request at a time; leave --max-concurrency at 1")
    for library in ("torch", "transformers"):
        if not find_spec(library):
            raise ValueError(f"--torch needs {library}, not installed here: pip install {library}")
    target = target_of(options)
    if is_store(target):
        raise ValueError(
            f"--torch cannot read the converted store {target}; give --target the folder or hub id"
            " that it was made from, with its --draft"
        )
    if not is_qwen3(read_target(resolve_folder(target)).config.layers):
        raise ValueError(
            f"--torch runs Qwen3 alone (norms on q and k, no bias, no window), and {target} is"
            " another; leave --torch out"
        )
