"""Frozen, validated, hashable settings: what the networks are, and all that a program needs.

Nothing here knows a checkpoint dialect; `convert/packaging.py` resolves one into these classes.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

from dspark_jax.decoding import DecodeConfig, require

EMBEDDING_TAP = -1
GREEDY_TEMPERATURE = 1e-5  # below it a row is greedy for both networks (DeepSpec, utils/sampling)


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding in the terms of transformers' `modeling_rope_utils`.

    `attention_factor` is resolved (it multiplies cos and sin); fields of another kind are unused.
    """

    kind: Literal["default", "linear", "yarn", "llama3"] = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position: int = 0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def __post_init__(self) -> None:
        require(self.theta > 0, f"rope theta must be positive, got {self.theta}")
        require(self.factor > 0, f"rope factor must be positive, got {self.factor}")
        if self.kind in ("yarn", "llama3"):
            require(
                self.original_max_position > 0,
                f"rope type {self.kind} needs original_max_position_embeddings",
            )


@dataclass(frozen=True)
class LayersConfig:
    """Shape of a stack of decoder layers, the same for the target and the draft."""

    hidden_size: int  # D
    intermediate_size: int  # F
    num_layers: int  # L
    num_heads: int  # N
    num_kv_heads: int  # K
    head_dim: int  # H
    rope: RopeConfig
    norm_eps: float = 1e-6
    qk_norm: bool = True
    qkv_bias: bool = False
    output_bias: bool = False
    windows: tuple[int, ...] = ()  # per layer, rows a query sees, itself included; 0 = all

    def __post_init__(self) -> None:
        for name in ("hidden_size", "intermediate_size", "num_layers", "num_heads"):
            require(getattr(self, name) > 0, f"{name} must be positive, got {getattr(self, name)}")
        require(
            self.num_kv_heads > 0 and self.num_heads % self.num_kv_heads == 0,
            f"{self.num_heads} query heads do not divide over {self.num_kv_heads} key heads",
        )
        require(
            self.head_dim > 0 and self.head_dim % 2 == 0,
            f"head_dim must be positive and even, got {self.head_dim}",
        )
        if not self.windows:
            object.__setattr__(self, "windows", (0,) * self.num_layers)
        require(
            len(self.windows) == self.num_layers and min(self.windows) >= 0,
            f"windows must name one window for each of {self.num_layers} layers: {self.windows}",
        )


@dataclass(frozen=True)
class TargetConfig:
    """The target network."""

    layers: LayersConfig
    vocab_size: int  # V
    max_length: int  # the model's own limit in tokens
    tied: bool = False  # the head is the embedding

    def __post_init__(self) -> None:
        require(self.vocab_size > 1, f"vocab_size must be above 1, got {self.vocab_size}")
        require(self.max_length > 0, f"max_length must be positive, got {self.max_length}")


@dataclass(frozen=True)
class DraftConfig:
    """The draft network, resolved from whatever packaging it came in.

    With `sample_from_anchor` the block has `block_size` rows and each is sampled; without it
    (1 + N layout) the anchor's row is computed and not sampled, so one draft fewer comes out.
    """

    layers: LayersConfig
    vocab_size: int  # target ids: rows of the embedding and of W1
    draft_vocab_size: int  # rows of the head and of W2; equal to vocab_size unless reduced
    block_size: int  # rows of the trained block
    mask_token_id: int
    taps: tuple[int, ...]  # target layers whose output is tapped; -1 is the embedding
    target_hidden_size: int
    markov: Literal["none", "vanilla", "gated", "rnn"] = "none"
    markov_rank: int = 0  # R
    confidence: Literal["none", "hidden", "markov"] = "none"
    sample_from_anchor: bool = True
    causal: tuple[bool, ...] = ()  # per layer: causal inside the block
    own_embedding: bool = False  # else borrowed from the target, one buffer
    own_head: bool = False

    def __post_init__(self) -> None:
        least = 1 if self.sample_from_anchor else 2
        require(
            self.block_size >= least, f"block_size must be at least {least}, got {self.block_size}"
        )
        require(
            0 <= self.mask_token_id < self.vocab_size,
            f"mask_token_id {self.mask_token_id} is outside the {self.vocab_size} embedding rows",
        )
        require(len(self.taps) > 0, "target_layer_ids is empty: a draft needs at least one tap")
        require(
            all(a < b for a, b in zip(self.taps, self.taps[1:], strict=False))
            and self.taps[0] >= EMBEDDING_TAP,
            f"target_layer_ids must increase and start at -1 or later, got {list(self.taps)}",
        )
        require(
            (self.markov == "none") == (self.markov_rank == 0),
            f"markov head {self.markov} does not go with markov_rank {self.markov_rank}",
        )
        require(
            self.confidence != "markov" or self.markov != "none",
            "the confidence head reads the Markov embedding, but there is no Markov head",
        )
        require(
            0 < self.draft_vocab_size <= self.vocab_size,
            f"draft vocabulary {self.draft_vocab_size} is not within {self.vocab_size}",
        )
        require(
            self.draft_vocab_size == self.vocab_size or self.own_head,
            "a reduced draft vocabulary needs the draft's own lm_head",
        )
        if not self.causal:
            object.__setattr__(self, "causal", (False,) * self.layers.num_layers)
        require(
            len(self.causal) == self.layers.num_layers,
            f"causal must name one flag for each of {self.layers.num_layers} layers",
        )

    @property
    def max_drafts(self) -> int:
        """Drafts the trained block yields (P at most)."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    @property
    def reduced_vocabulary(self) -> bool:
        return self.draft_vocab_size < self.vocab_size


@dataclass(frozen=True)
class NgramConfig:
    """Prompt lookup as the drafter: continue as after an earlier match of the last tokens."""

    max_match: int = 3  # tokens at most that a match is judged by
    min_match: int = 1

    def __post_init__(self) -> None:
        require(
            1 <= self.min_match <= self.max_match,
            f"min_match {self.min_match} is not within 1 and max_match {self.max_match}",
        )


def default_dtype(platform: str) -> Literal["float32", "bfloat16"]:
    """The dtype where none is asked for."""
    return "float32" if platform == "cpu" else "bfloat16"


@dataclass(frozen=True)
class ModelConfig:
    """Everything static that a jitted entry point needs; hashable."""

    target: TargetConfig
    draft: DraftConfig | NgramConfig | None
    decode: DecodeConfig
    dtype: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self) -> None:
        require(
            self.dtype in ("float32", "bfloat16"),
            f"dtype must be float32 or bfloat16, got {self.dtype!r}",
        )
        draft, drafts = self.draft, self.decode.num_drafts
        if not isinstance(draft, DraftConfig) or draft.confidence == "none":
            lacks = "the draft has" if isinstance(draft, DraftConfig) else "there is"
            for name in ("costs", "temperatures"):
                given = bool(getattr(self.decode, name))
                require(not given, f"{name} are set, but {lacks} no confidence head")
        if draft is None:
            require(drafts == 0, f"num_drafts is {drafts}, but there is no draft")
            return
        if isinstance(draft, NgramConfig):
            require(drafts >= 1, "num_drafts must be at least 1 for prompt lookup")
            require(
                self.decode.confidence_threshold == 0.0,
                "confidence_threshold is set, but prompt lookup has no confidence head",
            )
            return
        require(
            1 <= drafts <= draft.max_drafts,
            f"num_drafts {drafts} is not within 1 and the trained block's {draft.max_drafts}",
        )
        target = self.target
        require(
            draft.vocab_size == target.vocab_size,
            f"the draft's vocabulary of {draft.vocab_size} differs from the target's"
            f" {target.vocab_size}",
        )
        require(
            draft.target_hidden_size == target.layers.hidden_size,
            f"the draft reads features of width {draft.target_hidden_size}, the target's are"
            f" {target.layers.hidden_size} wide",
        )
        last = target.layers.num_layers - 2  # transformers norms the last layer's slot (2.3)
        require(
            max(draft.taps) <= last,
            f"target_layer_ids {list(draft.taps)} reach past layer {last}, the last one that can"
            f" be tapped in a target of {target.layers.num_layers} layers",
        )
        require(
            self.decode.confidence_threshold == 0.0 or draft.confidence != "none",
            "confidence_threshold is set, but the draft has no confidence head",
        )

    @property
    def pair_digest(self) -> str:
        """Of the shapes of target and draft: what was fitted or timed for a pair names it so."""
        shapes = repr((self.target.layers, self.target.vocab_size, self.draft))
        return hashlib.sha256(shapes.encode()).hexdigest()[:16]

    @property
    def draft_network(self) -> DraftConfig | None:
        """The draft where it is a network, and not prompt lookup or nothing."""
        return self.draft if isinstance(self.draft, DraftConfig) else None
