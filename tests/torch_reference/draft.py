"""The draft network: backbone, Markov heads, confidence head."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3MLP,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    apply_rotary_pos_emb,
)


class Block(NamedTuple):
    """What one draft step yields; Q rows enter the backbone, P of them are sampled."""

    context: Tensor  # [rows, D] after fc and hidden_norm
    hidden: Tensor  # [P, D]
    base: Tensor  # [P, Vd]
    logits: Tensor  # [P, Vd]
    tokens: list[int]  # target ids
    confidence: Tensor | None  # [P]


class Attention(nn.Module):
    def __init__(self, config: Qwen3Config, window: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.groups = config.num_attention_heads, config.num_key_value_heads
        self.width, self.window, self.causal = config.head_dim, window, causal
        bias, size = config.attention_bias, config.hidden_size
        self.q_proj = nn.Linear(size, self.heads * self.width, bias=bias)
        self.k_proj = nn.Linear(size, self.groups * self.width, bias=bias)
        self.v_proj = nn.Linear(size, self.groups * self.width, bias=bias)
        self.o_proj = nn.Linear(self.heads * self.width, size, bias=bias)
        self.q_norm = Qwen3RMSNorm(self.width, eps=config.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(self.width, eps=config.rms_norm_eps)

    def key_value(self, rows: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Keys (normed and rotated) and values of `rows`, each [K, T, H]."""
        shape = (len(rows), self.groups, self.width)
        key = self.k_norm(self.k_proj(rows).view(shape)).transpose(0, 1)
        value = self.v_proj(rows).view(shape).transpose(0, 1)
        return apply_rotary_pos_emb(key, key, *angles, unsqueeze_dim=0)[1], value

    def forward(
        self,
        block: Tensor,
        angles: tuple[Tensor, Tensor],
        context: tuple[Tensor, Tensor],
    ) -> Tensor:
        """Attend from the block rows to all context rows and to the block itself."""
        rows = len(block)
        query = self.q_norm(self.q_proj(block).view(rows, self.heads, self.width)).transpose(0, 1)
        query = apply_rotary_pos_emb(query, query, *angles, unsqueeze_dim=0)[0]
        own_key, own_value = self.key_value(block, angles)
        key = torch.cat([context[0], own_key], dim=1)
        value = torch.cat([context[1], own_value], dim=1)
        repeats = self.heads // self.groups
        scores = query @ key.repeat_interleave(repeats, 0).transpose(1, 2) * self.width**-0.5
        distance = torch.arange(rows)[:, None] + context[0].shape[1] - torch.arange(key.shape[1])
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        if self.causal:
            hidden |= distance < 0
        if self.window:
            hidden |= distance >= self.window
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        mixed = weights @ value.repeat_interleave(repeats, 0)
        return self.o_proj(mixed.transpose(0, 1).reshape(rows, -1))


class Layer(nn.Module):
    def __init__(self, config: Qwen3Config, window: int, causal: bool) -> None:
        super().__init__()
        self.self_attn = Attention(config, window, causal)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self, block: Tensor, angles: tuple[Tensor, Tensor], context: tuple[Tensor, Tensor]
    ) -> Tensor:
        block = block + self.self_attn(self.input_layernorm(block), angles, context)
        return block + self.mlp(self.post_attention_layernorm(block))


class MarkovHead(nn.Module):
    """The correction B_k of the base logits by the tokens drawn so far."""

    def __init__(self, config: Qwen3Config, draft_vocab: int) -> None:
        super().__init__()
        rank, size = config.markov_rank, config.hidden_size
        self.kind = config.markov_head_type
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(size + rank, rank)
        elif self.kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + size, 3 * rank)
        elif self.kind != "vanilla":
            raise ValueError(f"unknown markov_head_type {self.kind}")

    def forward(self, previous: int, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return the bias of one position and the recurrent state after it."""
        embedded = self.markov_w1.weight[previous]
        if self.kind == "gated":
            embedded = torch.sigmoid(self.gate_proj(torch.cat([hidden, embedded]))) * embedded
        elif self.kind == "rnn":
            joint = self.joint_proj(torch.cat([state, embedded, hidden]))
            gate, candidate, out = joint.chunk(3)
            keep = torch.sigmoid(gate)
            state = keep * state + (1 - keep) * torch.tanh(candidate)
            embedded = torch.tanh(out)
        return self.markov_w2(embedded), state


class ConfidenceHead(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 1)

    def forward(self, features: Tensor) -> Tensor:
        return self.proj(features)[..., 0]


class TorchDraft(nn.Module):
    """A DSpark draft; `config` is a Qwen3Config that carries the draft's own keys.

    Besides the published keys it reads `sample_from_anchor` (absent: true), `draft_vocab_size`,
    `windows` and `causal` (one entry a layer; absent: unlimited, bidirectional).
    """

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.config = config
        layers, size = config.num_hidden_layers, config.hidden_size
        windows = getattr(config, "windows", None) or [0] * layers
        causal = getattr(config, "causal", None) or [False] * layers
        draft_vocab = getattr(config, "draft_vocab_size", None) or config.vocab_size
        self.from_anchor = getattr(config, "sample_from_anchor", True)
        self.taps = list(config.target_layer_ids)
        target_size = getattr(config, "target_hidden_size", None) or size
        self.embed_tokens = nn.Embedding(config.vocab_size, size)
        self.fc = nn.Linear(len(self.taps) * target_size, size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(
            Layer(config, window, flag) for window, flag in zip(windows, causal, strict=True)
        )
        self.norm = Qwen3RMSNorm(size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(size, draft_vocab, bias=False)
        self.rotary = Qwen3RotaryEmbedding(config)
        rank = config.markov_rank
        if rank:
            self.markov_head = MarkovHead(config, draft_vocab)
        self.confidence_reads_markov = False
        if getattr(config, "enable_confidence_head", False):
            self.confidence_reads_markov = config.confidence_head_with_markov
            self.confidence_head = ConfidenceHead(
                size + (rank if self.confidence_reads_markov else 0)
            )
        self.register_buffer("draft_to_target", torch.arange(draft_vocab), persistent=False)

    @property
    def max_drafts(self) -> int:
        return self.config.block_size - (0 if self.from_anchor else 1)

    def angles(self, start: int, rows: int) -> tuple[Tensor, Tensor]:
        """cos and sin of the absolute positions start .. start + rows - 1."""
        cos, sin = self.rotary(self.fc.weight, torch.arange(start, start + rows)[None])
        return cos[0], sin[0]

    def init_cache(self) -> list[tuple[Tensor, Tensor]]:
        empty = torch.zeros(self.config.num_key_value_heads, 0, self.config.head_dim)
        return [(empty, empty) for _ in self.layers]

    @torch.no_grad()
    def absorb(self, features: Tensor, cache: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Append the tapped `features` [rows, C*D] to the cache; return the context rows."""
        context = self.hidden_norm(self.fc(features))
        angles = self.angles(cache[0][0].shape[1], len(context))
        for i, layer in enumerate(self.layers):
            fresh = layer.self_attn.key_value(context, angles)
            cache[i] = tuple(
                torch.cat([old, new], 1) for old, new in zip(cache[i], fresh, strict=True)
            )
        return context

    @torch.no_grad()
    def propose(
        self,
        anchor: int,
        features: Tensor,
        cache: list[tuple[Tensor, Tensor]],
        draw: Callable[[Tensor], int],
    ) -> Block:
        """Absorb the waiting features, run the block once, walk the Markov head over it.

        `draw` picks a draft id from the logits [Vd] of one position.
        """
        context = self.absorb(features, cache)
        start, rows = cache[0][0].shape[1], self.config.block_size
        ids = torch.tensor([anchor] + [self.config.mask_token_id] * (rows - 1))
        block, angles = self.embed_tokens(ids), self.angles(start, rows)
        for layer, rows_before in zip(self.layers, cache, strict=True):
            block = layer(block, angles, rows_before)
        hidden = self.norm(block)[0 if self.from_anchor else 1 :]
        base = self.lm_head(hidden)
        logits, tokens = self.walk(anchor, hidden, base, draw)
        confidence = self.confidence(hidden, [anchor, *tokens[:-1]])
        return Block(context, hidden, base, logits, tokens, confidence)

    def walk(
        self, anchor: int, hidden: Tensor, base: Tensor, draw: Callable[[Tensor], int]
    ) -> tuple[Tensor, list[int]]:
        """Correct and draw one position after the other; the first previous token is the anchor."""
        state = torch.zeros(self.config.markov_rank)
        previous, rows, tokens = anchor, [], []
        for k in range(len(hidden)):
            corrected = base[k]
            if self.config.markov_rank:
                bias, state = self.markov_head(previous, hidden[k], state)
                corrected = corrected + bias
            previous = int(self.draft_to_target[draw(corrected)])
            rows.append(corrected)
            tokens.append(previous)
        return torch.stack(rows), tokens

    def confidence(self, hidden: Tensor, previous: list[int]) -> Tensor | None:
        """Confidence logits; position k sees the token before it, never its own."""
        if not hasattr(self, "confidence_head"):
            return None
        if self.confidence_reads_markov:
            hidden = torch.cat([hidden, self.markov_head.markov_w1.weight[previous]], dim=-1)
        return self.confidence_head(hidden)


def load_draft(folder: str | Path, target: PreTrainedModel) -> TorchDraft:
    """Read a draft in the published format; head and embedding it lacks come from the target."""
    folder = Path(folder)
    keys = json.loads((folder / "config.json").read_text())
    keys.setdefault("markov_rank", 0)
    draft = TorchDraft(Qwen3Config.from_dict(keys))
    tensors = {name: t.float() for name, t in load_file(folder / "model.safetensors").items()}
    tensors.setdefault("embed_tokens.weight", target.get_input_embeddings().weight.detach())
    tensors.setdefault("lm_head.weight", target.get_output_embeddings().weight.detach())
    draft.load_state_dict(tensors)
    return draft.eval()
