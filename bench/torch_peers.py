"""What PyTorch does with the same shapes: transformers' compiled decoding, and DSpark run eagerly.

Weights are random and made on the device. The DSpark loop is greedy, of one row, with a vanilla
Markov head, and reads every round on the host: plain PyTorch, as the published evaluator runs it.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel, Qwen3Config
from transformers.generation.streamers import BaseStreamer
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3MLP,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    apply_rotary_pos_emb,
)

from bench.torch_rules import is_qwen3, loop_lacks
from dspark_jax.config import DraftConfig, LayersConfig, ModelConfig

Rows = tuple[Tensor, Tensor]  # keys and values [K, rows, H], or cos and sin [rows, H]
SETTLING = 8  # tokens before a decode step is timed: prefill, compilation, capture


def qwen3_config(layers: LayersConfig, vocab_size: int, tied: bool, length: int) -> Qwen3Config:
    """The shapes as transformers names them. Raises ValueError for another architecture."""
    if not is_qwen3(layers):
        raise ValueError("the PyTorch peers run Qwen3 alone: norms on q and k, no bias, no window")
    if layers.rope.kind != "default":
        raise ValueError(f"the PyTorch peers have no rotary embedding of kind {layers.rope.kind}")
    return Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=layers.hidden_size,
        intermediate_size=layers.intermediate_size,
        num_hidden_layers=layers.num_layers,
        num_attention_heads=layers.num_heads,
        num_key_value_heads=layers.num_kv_heads,
        head_dim=layers.head_dim,
        rms_norm_eps=layers.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": layers.rope.theta},
        max_position_embeddings=length,
        tie_word_embeddings=tied,
    )


def build_target(config: ModelConfig, length: int, device: str) -> PreTrainedModel:
    """A random target in the dtype of `config`."""
    target = config.target
    shapes = qwen3_config(target.layers, target.vocab_size, target.tied, length)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(shapes, dtype=getattr(torch, config.dtype))
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()


class Stamps(BaseStreamer):
    """Notes when each token came."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def put(self, value: Tensor) -> None:
        self.seconds.append(time.perf_counter())

    def end(self) -> None:
        """All has been noted."""


def decode_us(model: PreTrainedModel, ids: Tensor, tokens: int) -> float:
    """Microseconds a token of `generate` with a static cache, which compiles itself on a GPU."""
    stamps = Stamps()
    generate: Any = model.generate  # torch types an attribute of a module as a tensor
    generate(
        ids[None],
        attention_mask=torch.ones_like(ids)[None],
        max_new_tokens=tokens + SETTLING,
        do_sample=False,
        cache_implementation="static",
        streamer=stamps,
    )
    timed = stamps.seconds[-tokens - 1 :]
    return (timed[-1] - timed[0]) / tokens * 1e6


def turned(heads: Tensor, angles: Rows) -> Tensor:
    """Rotated heads [N, rows, H]."""
    return apply_rotary_pos_emb(heads, heads, *angles, unsqueeze_dim=0)[0]


class Attention(nn.Module):
    def __init__(self, config: LayersConfig) -> None:
        super().__init__()
        self.width, size = config.head_dim, config.hidden_size
        self.heads, self.groups = config.num_heads, config.num_kv_heads
        self.q_proj = nn.Linear(size, self.heads * self.width, bias=False)
        self.k_proj = nn.Linear(size, self.groups * self.width, bias=False)
        self.v_proj = nn.Linear(size, self.groups * self.width, bias=False)
        self.o_proj = nn.Linear(self.heads * self.width, size, bias=False)
        self.q_norm = Qwen3RMSNorm(self.width, eps=config.norm_eps)
        self.k_norm = Qwen3RMSNorm(self.width, eps=config.norm_eps)

    def key_value(self, rows: Tensor, angles: Rows) -> Rows:
        key = self.k_norm(self.k_proj(rows).view(len(rows), self.groups, self.width))
        value = self.v_proj(rows).view(len(rows), self.groups, self.width)
        return turned(key.transpose(0, 1), angles), value.transpose(0, 1)

    def forward(self, block: Tensor, angles: Rows, context: Rows) -> Tensor:
        """The block sees all context rows and all of itself."""
        query = self.q_norm(self.q_proj(block).view(len(block), self.heads, self.width))
        query = turned(query.transpose(0, 1), angles)
        own = self.key_value(block, angles)
        key, value = (torch.cat(pair, 1) for pair in zip(context, own, strict=True))
        mixed = scaled_dot_product_attention(query, key, value, enable_gqa=True)
        return self.o_proj(mixed.transpose(0, 1).reshape(len(block), -1))


class Layer(nn.Module):
    def __init__(self, config: LayersConfig, shapes: Qwen3Config) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = Qwen3MLP(shapes)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.norm_eps)

    def forward(self, block: Tensor, angles: Rows, context: Rows) -> Tensor:
        block = block + self.self_attn(self.input_layernorm(block), angles, context)
        return block + self.mlp(self.post_attention_layernorm(block))


class MarkovHead(nn.Module):
    def __init__(self, vocab_size: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, vocab_size, bias=False)


class Draft(nn.Module):
    """Parallel backbone and Markov head; embedding and head are the target's."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        if reason := loop_lacks(config):
            raise ValueError(f"the PyTorch peer cannot run a draft that {reason}")
        shapes = qwen3_config(config.layers, config.vocab_size, False, config.vocab_size)
        size = config.layers.hidden_size
        self.config = config
        self.fc = nn.Linear(len(config.taps) * config.target_hidden_size, size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(size, eps=config.layers.norm_eps)
        self.layers = nn.ModuleList(
            [Layer(config.layers, shapes) for _ in range(config.layers.num_layers)]
        )
        self.norm = Qwen3RMSNorm(size, eps=config.layers.norm_eps)
        self.rotary = Qwen3RotaryEmbedding(shapes)
        self.markov_head = MarkovHead(config.vocab_size, config.markov_rank)


class Decoder:
    """Greedy DSpark rounds of one row after a prompt."""

    def __init__(self, target: PreTrainedModel, draft: Draft, ids: Tensor) -> None:
        self.target, self.draft, self.cached = target, draft, 0
        self.cache = DynamicCache()
        self.context: list[Rows] = []
        logits, self.features = self._run_target(ids, logits_to_keep=1)
        self.anchor = logits[-1].argmax()

    @torch.no_grad()
    def round(self) -> list[int]:
        """Draft, verify, commit; returns the tokens emitted."""
        drafts = self._propose()
        logits, features = self._run_target(torch.cat([self.anchor[None], drafts]))
        best = logits.argmax(-1)
        accepted = int((drafts == best[:-1]).cumprod(0).sum())
        self.cache.crop(accepted - len(drafts))
        self.cached += accepted - len(drafts)
        self.features, self.anchor = features[: accepted + 1], best[accepted]
        return [*drafts[:accepted].tolist(), int(self.anchor)]

    @torch.no_grad()
    def _run_target(self, ids: Tensor, logits_to_keep: int = 0) -> tuple[Tensor, Tensor]:
        """Logits (of the last rows, or all) and tapped features of each row."""
        # The cache goes in by place: transformers renames its keyword within version 5.
        output = self.target(
            *(ids[None], None, None, self.cache),
            use_cache=True,
            output_hidden_states=True,
            logits_to_keep=logits_to_keep,
        )
        self.cached += len(ids)
        taps = self.draft.config.taps
        tapped = [output.hidden_states[tap + 1][0] for tap in taps]
        return output.logits[0], torch.cat(tapped, -1)

    def _propose(self) -> Tensor:
        draft, config = self.draft, self.draft.config
        rows = draft.hidden_norm(draft.fc(self.features))
        angles = self._angles(self.cached - len(rows), len(rows))
        layers: Any = draft.layers
        fresh = [layer.self_attn.key_value(rows, angles) for layer in layers]
        if self.context:
            pairs = zip(self.context, fresh, strict=True)
            fresh = [(torch.cat([k, m], 1), torch.cat([v, w], 1)) for (k, v), (m, w) in pairs]
        self.context = fresh
        masks = self.anchor.new_full((config.block_size - 1,), config.mask_token_id)
        block = self.target.get_input_embeddings()(torch.cat([self.anchor[None], masks]))
        angles = self._angles(self.cached, config.block_size)
        for layer, context in zip(layers, self.context, strict=True):
            block = layer(block, angles, context)
        base = self.target.get_output_embeddings()(draft.norm(block))
        previous, head, tokens = self.anchor, draft.markov_head, []
        for row in base:
            previous = (row + head.markov_w2(head.markov_w1(previous))).argmax()
            tokens.append(previous)
        return torch.stack(tokens)

    def _angles(self, start: int, rows: int) -> Rows:
        positions = torch.arange(start, start + rows, device=self.anchor.device)
        cos, sin = self.draft.rotary(self.draft.fc.weight, positions[None])
        return cos[0], sin[0]


def build_draft(config: DraftConfig, dtype: str, device: str) -> Draft:
    """A random draft."""
    with torch.device(device):
        draft = Draft(config).eval()
    for weight in draft.parameters():  # rotary frequencies, no parameter, stay in float32
        weight.data = weight.data.to(getattr(torch, dtype))
    return draft


def round_us(decoder: Decoder, rounds: int) -> float:
    """Microseconds of a round, on the host's clock: each round reads what it emitted."""
    decoder.round()
    begin = time.perf_counter()
    for _ in range(rounds):
        decoder.round()
    return (time.perf_counter() - begin) / rounds * 1e6


def random_prompt(config: ModelConfig, rows: int, device: str) -> Any:
    """Random ids [rows]."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(config.target.vocab_size, (rows,), generator=generator)
    return ids.to(device)
