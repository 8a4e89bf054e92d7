"""Weights and sizes of a tiny target and its draft, by the names of the DeepSpec packaging."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

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
