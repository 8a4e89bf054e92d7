"""The target network: tokens to final hidden states, tapped features and cache rows."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from dspark_jax.config import EMBEDDING_TAP, TargetConfig
from dspark_jax.layers import DecoderLayer, Embedding, Linear, RMSNorm, rope_table
from dspark_jax.packing import WHOLE, Packing, Whole
from dspark_jax.state import KVCache
from pallas_kernels.projection import project


class Target(nnx.Module):
    """A dense decoder: Qwen3 and its relatives."""

    def __init__(self, config: TargetConfig, *, dtype: Any) -> None:
        layers, width = config.layers, config.layers.hidden_size
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, width, dtype=dtype)
        self.layers = nnx.List(
            [DecoderLayer(layers, dtype=dtype) for _ in range(layers.num_layers)]
        )
        self.norm = RMSNorm(width, eps=layers.norm_eps, dtype=dtype)
        if not config.tied:
            self.lm_head = Linear(config.vocab_size, width, dtype=dtype)

    @property
    def head(self) -> Float[Array, "V D"]:
        owner = self.embed_tokens if self.config.tied else self.lm_head
        return owner.weight[...]

    def logits(self, hidden: Float[Array, "*rows D"]) -> Float[Array, "*rows V"]:
        """Float32 logits: the accumulators are never rounded to bfloat16."""
        return project(hidden, self.head, jnp.float32)

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        cache: KVCache,
        start: Int[Array, " B"],
        taps: tuple[int, ...],
        implementation: str,
        packing: Packing | Whole = WHOLE,
    ) -> tuple[Float[Array, "*rows D"], Float[Array, "*rows CD"], KVCache]:
        """Run T rows at positions start..start+T-1, each seeing the cache rows before it.

        Returns the normed hidden states, the outputs of the tapped layers side by side in tap
        order (-1 is the embedding), and the cache with T more rows. With a packing the first two
        are packed, and what a row that it leaves out writes is garbage.
        """
        layers = self.config.layers
        positions = start[:, None] + jnp.arange(tokens.shape[1])
        rope = rope_table(layers.rope, layers.head_dim, positions)
        x = self.embed_tokens(packing.pack(tokens))
        outputs = {EMBEDDING_TAP: x}
        keys, values = [], []
        for index, layer in enumerate(self.layers):
            x, k, v = layer(
                x,
                rope,
                cache.k[index],
                cache.v[index],
                start,
                packing,
                causal=True,
                window=layers.windows[index],
                implementation=implementation,
            )
            outputs[index] = x
            keys.append(k)
            values.append(v)
        empty = x[..., :0]
        tapped = jnp.concatenate([outputs[tap] for tap in taps] or [empty], axis=-1)
        return self.norm(x), tapped, KVCache(k=tuple(keys), v=tuple(values))
