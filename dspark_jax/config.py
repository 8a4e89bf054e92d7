"""Frozen, validated, hashable settings: what a network is and how it is decoded.

Nothing here knows a checkpoint dialect; `convert/packaging.py` resolves one into these classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dspark_jax.tiers import BatchCosts

EMBEDDING_TAP = -1
GREEDY_TEMPERATURE = 1e-5  # below it a row is greedy for both networks (DeepSpec, utils/sampling)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


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
        _require(self.theta > 0, f"rope theta must be positive, got {self.theta}")
        _require(self.factor > 0, f"rope factor must be positive, got {self.factor}")
        if self.kind in ("yarn", "llama3"):
            _require(
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
            _require(getattr(self, name) > 0, f"{name} must be positive, got {getattr(self, name)}")
        _require(
            self.num_kv_heads > 0 and self.num_heads % self.num_kv_heads == 0,
            f"{self.num_heads} query heads do not divide over {self.num_kv_heads} key heads",
        )
        _require(
            self.head_dim > 0 and self.head_dim % 2 == 0,
            f"head_dim must be positive and even, got {self.head_dim}",
        )
        if not self.windows:
            object.__setattr__(self, "windows", (0,) * self.num_layers)
        _require(
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
        _require(self.vocab_size > 1, f"vocab_size must be above 1, got {self.vocab_size}")
        _require(self.max_length > 0, f"max_length must be positive, got {self.max_length}")


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
        _require(
            self.block_size >= least, f"block_size must be at least {least}, got {self.block_size}"
        )
        _require(
            0 <= self.mask_token_id < self.vocab_size,
            f"mask_token_id {self.mask_token_id} is outside the {self.vocab_size} embedding rows",
        )
        _require(len(self.taps) > 0, "target_layer_ids is empty: a draft needs at least one tap")
        _require(
            all(a < b for a, b in zip(self.taps, self.taps[1:], strict=False))
            and self.taps[0] >= EMBEDDING_TAP,
            f"target_layer_ids must increase and start at -1 or later, got {list(self.taps)}",
        )
        _require(
            (self.markov == "none") == (self.markov_rank == 0),
            f"markov head {self.markov} does not go with markov_rank {self.markov_rank}",
        )
        _require(
            self.confidence != "markov" or self.markov != "none",
            "the confidence head reads the Markov embedding, but there is no Markov head",
        )
        _require(
            0 < self.draft_vocab_size <= self.vocab_size,
            f"draft vocabulary {self.draft_vocab_size} is not within {self.vocab_size}",
        )
        _require(
            self.draft_vocab_size == self.vocab_size or self.own_head,
            "a reduced draft vocabulary needs the draft's own lm_head",
        )
        if not self.causal:
            object.__setattr__(self, "causal", (False,) * self.layers.num_layers)
        _require(
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
        _require(
            1 <= self.min_match <= self.max_match,
            f"min_match {self.min_match} is not within 1 and max_match {self.max_match}",
        )


@dataclass(frozen=True)
class DecodeConfig:
    """Static switches of a run: each distinct value is one compiled program."""

    max_length: int  # prompt and output together, in tokens
    prefill_chunk: int = 256
    num_drafts: int = 0  # P; 0 is plain decoding
    confidence_threshold: float = 0.0
    costs: tuple[BatchCosts, ...] = ()  # of each batch: verification is scheduled by them
    temperatures: tuple[float, ...] = ()  # of the confidence logits, by position; () is 1
    rejection: Literal["token", "block", "gumbel"] = "token"
    draft_sampling: Literal["probabilistic", "greedy"] = "probabilistic"
    draft_top_k: int = 0
    draft_truncation: bool = False
    sampled: bool = True  # False: every row is greedy; no noise, no law of the whole vocabulary
    controls: bool = False  # rows may bring a bias, penalties or a least length
    logprobs: int = 0  # most likely tokens to report; 0 = report nothing at all
    ceiling: bool = False  # report what draft and target law allow at each position
    # Of attention and cache writes. "auto": kernels where they run; "pallas": kernels, or an error.
    implementation: Literal["auto", "pallas", "xla"] = "auto"

    def __post_init__(self) -> None:
        _require(self.max_length >= 2, f"max_length must be at least 2, got {self.max_length}")
        _require(self.prefill_chunk >= 1, f"prefill_chunk must be positive: {self.prefill_chunk}")
        _require(self.num_drafts >= 0, f"num_drafts cannot be negative: {self.num_drafts}")
        _require(
            0.0 <= self.confidence_threshold <= 1.0,
            f"confidence_threshold must be within 0 and 1, got {self.confidence_threshold}",
        )
        for name, choices in (
            ("rejection", ("token", "block", "gumbel")),
            ("draft_sampling", ("probabilistic", "greedy")),
        ):
            value = getattr(self, name)
            _require(value in choices, f"{name} must be one of {choices}, got {value!r}")
        _require(self.logprobs >= 0, f"logprobs cannot be negative: {self.logprobs}")
        _require(self.sampled or not self.ceiling, "ceiling needs laws: set sampled")
        _require(self.draft_top_k >= 0, f"draft_top_k cannot be negative: {self.draft_top_k}")

    @property
    def step_rows(self) -> int:
        """Rows of one verify pass: the anchor and its drafts (T)."""
        return self.num_drafts + 1


@dataclass(frozen=True)
class ModelConfig:
    """Everything static that a jitted entry point needs; hashable."""

    target: TargetConfig
    draft: DraftConfig | NgramConfig | None
    decode: DecodeConfig
    dtype: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self) -> None:
        _require(
            self.dtype in ("float32", "bfloat16"),
            f"dtype must be float32 or bfloat16, got {self.dtype!r}",
        )
        draft, drafts = self.draft, self.decode.num_drafts
        if draft is None:
            _require(drafts == 0, f"num_drafts is {drafts}, but there is no draft")
            return
        if isinstance(draft, NgramConfig):
            _require(drafts >= 1, "num_drafts must be at least 1 for prompt lookup")
            _require(
                self.decode.confidence_threshold == 0.0,
                "confidence_threshold is set, but prompt lookup has no confidence head",
            )
            return
        _require(
            1 <= drafts <= draft.max_drafts,
            f"num_drafts {drafts} is not within 1 and the trained block's {draft.max_drafts}",
        )
        target = self.target
        _require(
            draft.vocab_size == target.vocab_size,
            f"the draft's vocabulary of {draft.vocab_size} differs from the target's"
            f" {target.vocab_size}",
        )
        _require(
            draft.target_hidden_size == target.layers.hidden_size,
            f"the draft reads features of width {draft.target_hidden_size}, the target's are"
            f" {target.layers.hidden_size} wide",
        )
        last = target.layers.num_layers - 2  # transformers norms the last layer's slot (2.3)
        _require(
            max(draft.taps) <= last,
            f"target_layer_ids {list(draft.taps)} reach past layer {last}, the last one that can"
            f" be tapped in a target of {target.layers.num_layers} layers",
        )
        _require(
            self.decode.confidence_threshold == 0.0 or draft.confidence != "none",
            "confidence_threshold is set, but the draft has no confidence head",
        )

    @property
    def draft_network(self) -> DraftConfig | None:
        """The draft where it is a network, and not prompt lookup or nothing."""
        return self.draft if isinstance(self.draft, DraftConfig) else None
