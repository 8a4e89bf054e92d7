"""Tiny checkpoints on disk in every packaging, written from one set of weights without PyTorch.

Values are exact in bfloat16, so that every stored dtype means the same numbers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tests.dialects import DIALECTS, speculators
from tests.tiny_pair import Tensors, TinyPair, Tree


def save_json(path: Path, tree: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(tree))


def save_tensors(path: Path, tensors: Tensors, dtype: np.dtype | None = None) -> None:
    """Write a safetensors file; floating tensors cast to `dtype`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = (np.dtype(np.int64), np.dtype(np.int32), np.dtype(bool), np.dtype(np.uint8))
    cast = {
        name: np.ascontiguousarray(x if dtype is None or x.dtype in whole else x.astype(dtype))
        for name, x in tensors.items()
    }
    save_file(cast, path, metadata={"format": "pt"})


def save_shards(folder: Path, tensors: Tensors, count: int) -> list[str]:
    """Write the tensors over `count` files with an index; return the names of the files."""
    names = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    held = {name: names[i % count] for i, name in enumerate(sorted(tensors))}
    for file in names:
        save_tensors(folder / file, {n: tensors[n] for n, f in held.items() if f == file})
    size = sum(x.nbytes for x in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": held}
    save_json(folder / "model.safetensors.index.json", index)
    return names


def target_files(pair: TinyPair) -> tuple[Tree, Tensors]:
    """The config and the tensors of the target as transformers 5 saves them."""
    tree = pair.layer_tree(pair.depth) | {
        "architectures": ["Qwen3ForCausalLM"],
        "tie_word_embeddings": pair.tied,
        "eos_token_id": 3,
    }
    tensors = {n if n == "lm_head.weight" else f"model.{n}": x for n, x in pair.target.items()}
    return tree, tensors


def write_target(folder: Path, pair: TinyPair, **changes: Any) -> Path:
    """Write the target; `changes` replace keys of its config."""
    tree, tensors = target_files(pair)
    save_json(folder / "config.json", tree | changes)
    save_json(folder / "generation_config.json", {"eos_token_id": [3, 7]})
    save_tensors(folder / "model.safetensors", tensors)
    return folder


def write_draft(folder: Path, pair: TinyPair, dialect: str = "deepspec", **changes: Any) -> Path:
    """Write the draft in a dialect; `changes` replace keys at the root of its config."""
    tree, tensors = DIALECTS[dialect](pair)
    save_json(folder / "config.json", tree | changes)
    save_tensors(folder / "model.safetensors", tensors)
    return folder


def reduce_vocabulary(pair: TinyPair, tensors: Tensors, kept: np.ndarray) -> Tensors:
    """Return speculators tensors with the draft's head and W2 cut to the ids `kept`."""
    rows = len(kept)
    head = {"lm_head.weight": pair.head()[kept]}
    if pair.markov != "none":
        w2 = "markov_head.markov_w2.weight"
        head[w2] = pair.draft[w2][kept]
    present = np.zeros(pair.vocab, bool)
    present[kept] = True
    maps = {"d2t": (kept - np.arange(rows)).astype(np.int64), "t2d": present}
    return tensors | head | maps


def write_reduced(folder: Path, pair: TinyPair, kept: np.ndarray, **changes: Any) -> Path:
    """Write a speculators draft whose head and W2 are cut to the ids `kept`."""
    tree, tensors = speculators(pair)
    save_json(folder / "config.json", tree | {"draft_vocab_size": len(kept)} | changes)
    save_tensors(folder / "model.safetensors", reduce_vocabulary(pair, tensors, kept))
    return folder
