"""The DSpark draft: context rows, block backbone, base logits, Markov walk, confidence -> Proposal.

The context stream is `hidden_norm(fc(features))` and nothing else: it never passes an
input_layernorm (paper section on the backbone; DeepSpec's modeling code). The block's own rows are
overwritten by the next round's context, so the cache keeps context rows only.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from dspark_jax.config import DecodeConfig, DraftConfig
from dspark_jax.layers import (
    DecoderLayer,
    Embedding,
    Linear,
    RMSNorm,
    rope_table,
)
from dspark_jax.markov import MarkovHead, walk
from dspark_jax.sampling import (
    Stream,
    draw,
    gumbel_noise,
    largest,
    one_hot_law,
    stream_keys,
    token_law,
)
from dspark_jax.schedule import confidences
from dspark_jax.sharding import CACHE, gather_logits, per_device, spec
from dspark_jax.state import DecodeState, KVCache, Proposal, Sampling
from pallas_kernels.context_kv import context_kv
from pallas_kernels.projection import project


class ConfidenceHead(nnx.Module):
    def __init__(self, width: int, *, dtype: Any) -> None:
        self.proj = Linear(1, width, bias=True, dtype=dtype)


class Draft(nnx.Module):
    """Parallel backbone with its heads; what it borrows (embedding, head) is handed in."""

    def __init__(self, config: DraftConfig, *, dtype: Any) -> None:
        layers, width = config.layers, config.layers.hidden_size
        kv_width = layers.num_kv_heads * layers.head_dim
        self.config = config
        if config.own_embedding:
            self.embed_tokens = Embedding(config.vocab_size, width, dtype=dtype)
        if config.own_head:
            self.lm_head = Linear(config.draft_vocab_size, width, dtype=dtype)
        self.fc = Linear(width, len(config.taps) * config.target_hidden_size, dtype=dtype)
        self.hidden_norm = RMSNorm(width, eps=layers.norm_eps, dtype=dtype)
        self.layers = nnx.List(
            [DecoderLayer(layers, dtype=dtype) for _ in range(layers.num_layers)]
        )
        self.norm = RMSNorm(width, eps=layers.norm_eps, dtype=dtype)
        self.context_kv = Linear(
            layers.num_layers * 2 * kv_width, width, bias=layers.qkv_bias, dtype=dtype
        )
        if config.markov != "none":
            self.markov_head = MarkovHead(config, dtype=dtype)
        if config.confidence != "none":
            rank = config.markov_rank if config.confidence == "markov" else 0
            self.confidence_head = ConfidenceHead(width + rank, dtype=dtype)
        if config.reduced_vocabulary:
            self.draft_to_target = nnx.Param(jnp.zeros((config.draft_vocab_size,), jnp.int32))

    def context_rows(self, features: Float[Array, "B T CD"]) -> Float[Array, "B T D"]:
        """Tapped target features to context rows."""
        return self.hidden_norm(self.fc(features))

    def write_context(
        self,
        rows: Float[Array, "B T D"],
        cache: KVCache,
        start: Int[Array, " B"],
        count: Int[Array, " B"],
        implementation: str,
    ) -> KVCache:
        """Keys and values of all layers from one matmul; the first `count` rows go to `start`."""
        layers = self.config.layers
        norms = None
        if layers.qk_norm:
            norms = jnp.stack([layer.self_attn.k_norm.weight[...] for layer in self.layers])
        positions = start[:, None] + jnp.arange(rows.shape[1])
        rope = rope_table(layers.rope, layers.head_dim, positions)
        slots, caches = spec("B"), spec(CACHE)
        write = per_device(
            partial(context_kv, eps=layers.norm_eps, implementation=implementation),
            (spec("B T K"), spec("-"), slots, slots, caches, caches, slots, slots),
            (caches, caches),
        )
        keys, values = write(self.context_kv(rows), norms, *rope, cache.k, cache.v, start, count)
        return KVCache(k=tuple(keys), v=tuple(values))

    def block(
        self, x: Float[Array, "B Q D"], cache: KVCache, start: Int[Array, " B"], implementation: str
    ) -> tuple[Float[Array, "B Q D"], KVCache]:
        """The block's rows at start..start+Q-1 over all context rows, in both directions."""
        config = self.config.layers
        positions = start[:, None] + jnp.arange(x.shape[1])
        rope = rope_table(config.rope, config.head_dim, positions)
        keys, values = [], []
        for index, layer in enumerate(self.layers):
            x, k, v = layer(
                x,
                rope,
                cache.k[index],
                cache.v[index],
                start,
                causal=self.config.causal[index],
                window=config.windows[index],
                implementation=implementation,
            )
            keys.append(k)
            values.append(v)
        return self.norm(x), KVCache(k=tuple(keys), v=tuple(values))

    def confidence_logits(
        self, hidden: Float[Array, "B P D"], previous: Int[Array, "B P"]
    ) -> Float[Array, "B C"]:
        """Acceptance logit of each slot from its hidden state and the token before it, never from
        the token it judges; width 0 without a head."""
        kind = self.config.confidence
        if kind == "none":
            return jnp.zeros((hidden.shape[0], 0), jnp.float32)
        if kind == "markov":
            hidden = jnp.concatenate([hidden, self.markov_head.markov_w1(previous)], axis=-1)
        proj = self.confidence_head.proj
        logits = project(hidden, proj.weight[...], jnp.float32)[..., 0]
        return logits + proj.bias[...].astype(jnp.float32)

    def target_ids(self, places: Int[Array, "*rows"]) -> Int[Array, "*rows"]:
        """Draft ids to target ids."""
        if not self.config.reduced_vocabulary:
            return places
        return self.draft_to_target[...][places]


def block_tokens(config: DraftConfig, anchor: Int[Array, " B"]) -> Int[Array, "B Q"]:
    """[anchor, mask, mask, ...]: the whole trained block."""
    masks = jnp.full((anchor.shape[0], config.block_size - 1), config.mask_token_id, anchor.dtype)
    return jnp.concatenate([anchor[:, None], masks], axis=1)


def sampled_rows(
    config: DraftConfig, hidden: Float[Array, "B Q D"], drafts: int
) -> Float[Array, "B P D"]:
    """The block rows that predict: from the anchor's own, or from the one after it (1 + N)."""
    first = 0 if config.sample_from_anchor else 1
    return hidden[:, first : first + drafts]


def propose(
    draft: Draft,
    hidden: Float[Array, "B P D"],
    head: Float[Array, "Vd D"],
    state: DecodeState,
    decode: DecodeConfig,
) -> Proposal:
    """Draw P tokens left to right from the block's hidden states (paper, Markov sampling)."""
    base = gather_logits(project(hidden, head, jnp.float32))
    places = None
    if 0 < decode.draft_top_k < base.shape[-1]:
        base, places = jax.lax.top_k(base, decode.draft_top_k)
    ids = None if places is None else draft.target_ids(places)
    if places is None and draft.config.reduced_vocabulary:
        ids = jnp.broadcast_to(draft.draft_to_target[...], base.shape)

    def support(slot: Array, place: Array) -> Array:
        if ids is None:
            return place
        return jnp.take_along_axis(ids[:, slot], place[:, None], axis=1)[:, 0]

    choose = _sampled_choice(state, decode, ids, draft.config.vocab_size)
    if not decode.sampled:
        choose = _greedy_choice
    markov = draft.markov_head if draft.config.markov != "none" else None
    with jax.named_scope("markov_walk"):
        tokens, laws, _ = walk(
            markov,
            base,
            hidden,
            state.anchor,
            support,
            places,
            choose,
            None if decode.sampled or ids is not None else decode.implementation,
        )
    if ids is not None and decode.sampled:
        laws = scatter_law(laws, ids, draft.config.vocab_size)
    previous = jnp.concatenate([state.anchor[:, None], tokens[:, :-1]], axis=1)
    confidence = draft.confidence_logits(hidden, previous)
    return Proposal(
        tokens=tokens,
        length=proposal_length(confidence, tokens.shape, decode),
        probs=laws,
        confidence=confidence,
    )


def _greedy_choice(slot: Array, logits: Float[Array, "B M"]) -> tuple[Array, Array]:
    return largest(logits), jnp.zeros((logits.shape[0], 0), jnp.float32)


def _sampled_choice(
    state: DecodeState, decode: DecodeConfig, ids: Int[Array, "B P M"] | None, vocab_size: int
) -> Callable[[Array, Array], tuple[Array, Array]]:
    def choose(slot: Array, logits: Float[Array, "B M"]) -> tuple[Array, Array]:
        law = draft_law(logits[:, None], state.sampling, decode)[:, 0]
        noise = draft_noise(state, slot, decode, vocab_size)
        if ids is not None:
            noise = jnp.take_along_axis(noise, ids[:, slot], axis=1)
        return draw(law, noise), law

    return choose


def draft_law(
    logits: Float[Array, "B T M"], sampling: Sampling, decode: DecodeConfig
) -> Float[Array, "B T M"]:
    """The draft's law under the engine's drafting choices; any choice keeps the emitted law."""
    if decode.draft_sampling == "greedy":
        return one_hot_law(logits)
    return token_law(logits, sampling, truncate=decode.draft_truncation)


def draft_noise(
    state: DecodeState, slot: Int[Array, ""], decode: DecodeConfig, vocab_size: int
) -> Float[Array, "B V"]:
    """Gumbel noise of a slot over target ids: the draft's own stream, or, in Gumbel
    verification, the target's at the position that the slot predicts."""
    if decode.rejection == "gumbel":
        keys = stream_keys(state.sampling, Stream.TARGET, state.cached + 1 + slot)
    else:
        keys = stream_keys(state.sampling, Stream.DRAFT, state.cached, slot)
    return gumbel_noise(keys, vocab_size)


def scatter_law(
    laws: Float[Array, "B P M"], ids: Int[Array, "B P M"], vocab_size: int
) -> Float[Array, "B P V"]:
    """A law over a few target ids as a law over all of them; the others have probability zero."""
    batch, count, _ = laws.shape
    full = jnp.zeros((batch, count, vocab_size), laws.dtype)
    rows, slots = jnp.arange(batch)[:, None, None], jnp.arange(count)[None, :, None]
    return full.at[rows, slots, ids].set(laws)


def proposal_length(
    logits: Float[Array, "B C"], shape: tuple[int, ...], decode: DecodeConfig
) -> Int[Array, " B"]:
    """Drafts before the first slot whose confidence is below the threshold (0 = the whole block).

    Per slot, not on the running product (DeepSpec's evaluator)."""
    batch, count = shape
    if decode.confidence_threshold == 0.0:
        return jnp.full((batch,), count, jnp.int32)
    sure = confidences(logits, decode.temperatures) >= decode.confidence_threshold
    return jnp.sum(jnp.cumprod(sure, axis=1), axis=1, dtype=jnp.int32)
