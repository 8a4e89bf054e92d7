"""Tiny checkpoints in every packaging, written from one set of weights, without PyTorch.

`TinyPair` makes the weights; `write_target` and `write_draft` write them in a dialect. Values are
exact in bfloat16, so that every stored dtype means the same numbers.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

Tensors = dict[str, np.ndarray]
Tree = dict[str, Any]
BF16 = np.dtype(ml_dtypes.bfloat16)


@dataclass
class TinyPair:
    """Sizes of a target and a draft, and their weights by the names of the DeepSpec packaging."""

    hidden: int = 32
    mlp: int = 48
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    depth: int = 6
    draft_depth: int = 2
    vocab: int = 64
    block: int = 5
    mask: int = 60
    taps: tuple[int, ...] = (0, 2, 3)
    markov: str = "vanilla"
    rank: int = 8
    confidence: str = "markov"  # none, hidden, markov
    tied: bool = False
    seed: int = 0
    target: Tensors = field(init=False)
    draft: Tensors = field(init=False)

    def __post_init__(self) -> None:
        self._random = np.random.default_rng(self.seed)
        self.target = self._layers(self.depth) | {
            "embed_tokens.weight": self.array(self.vocab, self.hidden),
            "norm.weight": self.array(self.hidden),
        }
        if not self.tied:
            self.target["lm_head.weight"] = self.array(self.vocab, self.hidden)
        self.draft = self._layers(self.draft_depth) | self._heads()
        self.draft |= {
            "fc.weight": self.array(self.hidden, len(self.taps) * self.hidden),
            "hidden_norm.weight": self.array(self.hidden),
            "norm.weight": self.array(self.hidden),
        }

    def array(self, *shape: int) -> np.ndarray:
        values = self._random.normal(size=shape).astype(np.float32) * 0.3
        return values.astype(BF16)

    def head(self) -> np.ndarray:
        """The target's head."""
        return self.target["embed_tokens.weight" if self.tied else "lm_head.weight"]

    def _layers(self, depth: int) -> Tensors:
        width, heads, keys = self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes = {
            "input_layernorm.weight": (width,),
            "post_attention_layernorm.weight": (width,),
            "self_attn.q_proj.weight": (heads, width),
            "self_attn.k_proj.weight": (keys, width),
            "self_attn.v_proj.weight": (keys, width),
            "self_attn.o_proj.weight": (width, heads),
            "self_attn.q_norm.weight": (self.head_dim,),
            "self_attn.k_norm.weight": (self.head_dim,),
            "mlp.gate_proj.weight": (self.mlp, width),
            "mlp.up_proj.weight": (self.mlp, width),
            "mlp.down_proj.weight": (width, self.mlp),
        }
        return {
            f"layers.{i}.{name}": self.array(*shape)
            for i in range(depth)
            for name, shape in shapes.items()
        }

    def _heads(self) -> Tensors:
        width, rank = self.hidden, self.rank
        shapes: dict[str, tuple[int, ...]] = {}
        if self.markov != "none":
            shapes["markov_head.markov_w1.weight"] = (self.vocab, rank)
            shapes["markov_head.markov_w2.weight"] = (self.vocab, rank)
        if self.markov == "gated":
            shapes["markov_head.gate_proj.weight"] = (rank, width + rank)
            shapes["markov_head.gate_proj.bias"] = (rank,)
        if self.markov == "rnn":
            shapes["markov_head.joint_proj.weight"] = (3 * rank, 2 * rank + width)
            shapes["markov_head.joint_proj.bias"] = (3 * rank,)
        if self.confidence != "none":
            reads = width + (rank if self.confidence == "markov" else 0)
            shapes["confidence_head.proj.weight"] = (1, reads)
            shapes["confidence_head.proj.bias"] = (1,)
        return {name: self.array(*shape) for name, shape in shapes.items()}

    def own(self) -> Tensors:
        """The draft's copies of the target's embedding and head."""
        return {
            "embed_tokens.weight": self.target["embed_tokens.weight"],
            "lm_head.weight": self.head(),
        }

    def layer_tree(self, depth: int) -> Tree:
        """The decoder-layer keys of a config.json as transformers 5 writes them."""
        return {
            "model_type": "qwen3",
            "attention_bias": False,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "intermediate_size": self.mlp,
            "layer_types": ["full_attention"] * depth,
            "max_position_embeddings": 512,
            "max_window_layers": 28,
            "num_attention_heads": self.heads,
            "num_hidden_layers": depth,
            "num_key_value_heads": self.kv_heads,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
            "sliding_window": None,
            "use_sliding_window": False,
            "vocab_size": self.vocab,
            "dtype": "bfloat16",
        }

    def markov_tree(self) -> Tree:
        """The keys of the sequential and the confidence head."""
        rank = self.rank if self.markov != "none" else 0
        tree: Tree = {"markov_rank": rank, "enable_confidence_head": self.confidence != "none"}
        if rank:
            tree["markov_head_type"] = self.markov
        if self.confidence != "none":
            tree["confidence_head_with_markov"] = self.confidence == "markov"
        return tree


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


def deepspec(pair: TinyPair) -> tuple[Tree, Tensors]:
    """P1: every key at the root, own copies of embedding and head."""
    tree = pair.layer_tree(pair.draft_depth) | pair.markov_tree()
    tree |= {
        "architectures": ["Qwen3DSparkModel"],
        "block_size": pair.block,
        "mask_token_id": pair.mask,
        "target_layer_ids": list(pair.taps),
        "num_target_layers": pair.depth,
        "num_anchors": 4,
        "tie_word_embeddings": False,
    }
    return tree, pair.draft | pair.own()


def torchspec(pair: TinyPair) -> tuple[Tree, Tensors]:
    """P2 as published: standard names, own embedding, neither head nor block size."""
    tree, tensors = deepspec(pair)
    tree.pop("block_size")
    tensors.pop("lm_head.weight")
    return tree, tensors


def torchspec_native(pair: TinyPair) -> tuple[Tree, Tensors]:
    """P2 as the trainer writes it: other names, and `num_target_layers` counts taps."""
    tree, tensors = deepspec(pair)
    tree |= {
        "model_type": "dflash",
        "target_hidden_size": pair.hidden,
        "target_num_hidden_layers": pair.depth,
        "num_target_layers": len(pair.taps),
    }
    renamed = {"fc": "context_proj", "hidden_norm": "context_norm", "norm": "final_norm"}
    tensors = {
        renamed.get(n.removesuffix(".weight"), n.removesuffix(".weight")) + ".weight"
        if n.endswith(".weight")
        else n: x
        for n, x in pair.draft.items()
    }
    return tree, tensors


def speculators(pair: TinyPair) -> tuple[Tree, Tensors]:
    """P3: the decoder layer as a difference from its class, taps counted one higher."""
    same_as_class = ("rope_parameters", "max_position_embeddings", "rms_norm_eps", "layer_types")
    layer = pair.layer_tree(pair.draft_depth)
    layer = {k: v for k, v in layer.items() if k not in same_as_class and v not in (None, False)}
    tree = {
        "architectures": ["DSparkDraftModel"],
        "auto_map": {"": "config.DSparkSpeculatorConfig"},
        "speculators_model_type": "dspark" if pair.markov != "none" else "dflash",
        "speculators_version": "0.3.0",
        "speculators_config": {
            "algorithm": "dspark",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": pair.block}],
            "verifier": {"name_or_path": "org/target", "architectures": ["Qwen3ForCausalLM"]},
        },
        "transformer_layer_config": layer,
        "draft_vocab_size": pair.vocab,
        "block_size": pair.block,
        "aux_hidden_state_layer_ids": [tap + 1 for tap in pair.taps],
        "mask_token_id": pair.mask,
        "target_hidden_size": None,
        "sliding_window_non_causal": False,
        "sample_from_anchor": True,
    }
    tensors = pair.draft | pair.own() | {"t2d": np.ones(pair.vocab, bool)}
    return tree | pair.markov_tree(), tensors


def specforge(pair: TinyPair) -> tuple[Tree, Tensors]:
    """P4: everything nested, transformers 4 rope keys, neither embedding nor head."""
    tree = pair.layer_tree(pair.draft_depth)
    tree.pop("rope_parameters")
    markov = pair.markov_tree()
    enabled = markov.pop("enable_confidence_head")
    tree |= {
        "architectures": ["DSparkDraftModel"],
        "auto_map": {"AutoModel": "dspark.DSparkDraftModel"},
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "block_size": pair.block,
        "num_target_layers": pair.depth,
        "torch_dtype": "bfloat16",
        "dflash_config": {
            "projector_type": "dspark",
            "attention_mode": "gqa",
            "mask_token_id": pair.mask,
            "target_layer_ids": list(pair.taps),
            "confidence_head_alpha": 1.0 if enabled else 0.0,
            **markov,
        },
    }
    return tree, dict(pair.draft)


def specforge_old(pair: TinyPair) -> tuple[Tree, Tensors]:
    """P4, older: the heads under `logit_head.`, settings repeated in `dspark_config`."""
    tree, tensors = specforge(pair)
    tree["dspark_config"] = dict(tree["dflash_config"])
    heads = ("markov_head", "confidence_head")
    return tree, {f"logit_head.{n}" if n.startswith(heads) else n: x for n, x in tensors.items()}


def z_lab(pair: TinyPair) -> tuple[Tree, Tensors]:
    """P5: DFlash in the 1 + N layout; no heads, neither embedding nor head."""
    tree, _ = specforge(pair)
    tree |= {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "dflash_config": {"mask_token_id": pair.mask, "target_layer_ids": list(pair.taps)},
    }
    return tree, {n: x for n, x in pair.draft.items() if "_head" not in n}


def z_lab_new(pair: TinyPair) -> tuple[Tree, Tensors]:
    """P5, newer: the block size nested too."""
    tree, tensors = z_lab(pair)
    tree["dflash_config"]["block_size"] = tree.pop("block_size")
    return tree, tensors


DIALECTS: dict[str, Callable[[TinyPair], tuple[Tree, Tensors]]] = {
    "deepspec": deepspec,
    "torchspec": torchspec,
    "torchspec-native": torchspec_native,
    "speculators": speculators,
    "specforge": specforge,
    "specforge-old": specforge_old,
    "z-lab": z_lab,
    "z-lab-new": z_lab_new,
}


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
