"""The building blocks of both networks against float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import layers
from dspark_jax.config import LayersConfig, RopeConfig
from tests import oracles
from tests.tiny import tiny_layers

ROPES = {
    "default": RopeConfig(theta=1e6),
    "linear": RopeConfig("linear", theta=1e4, factor=4.0),
    "yarn": RopeConfig("yarn", 1e4, 4.0, 64, attention_factor=1.14),
    "yarn, not truncated": RopeConfig("yarn", 1e4, 8.0, 128, beta_fast=16.0, truncate=False),
    "llama3": RopeConfig("llama3", 5e5, 8.0, 64, low_freq_factor=1.0, high_freq_factor=4.0),
}
ROWS, START = 4, (0, 3, 11)  # rows of a pass; cached rows of each batch row


@pytest.mark.parametrize("kind", ROPES)
@pytest.mark.parametrize("head_dim", [8, 64])
def test_rope(kind: str, head_dim: int) -> None:
    rope = ROPES[kind]
    ours = layers.rope_frequencies(rope, head_dim)
    np.testing.assert_allclose(ours, oracles.inverse_frequencies(rope, head_dim), rtol=1e-5)
    positions = jnp.array([[0, 1, 777]])
    cos, sin = layers.rope_table(rope, head_dim, positions)
    ones = np.concatenate([np.ones(head_dim // 2), np.zeros(head_dim // 2)])
    turned = oracles.rotate(np.tile(ones, (3, 1, 1)), np.asarray(positions)[0], rope)[:, 0]
    np.testing.assert_allclose(np.concatenate([cos, sin], -1)[0], turned, atol=5e-4)
    np.testing.assert_allclose(np.concatenate([cos, sin], -1)[0, :2], turned[:2], atol=1e-6)


def layer_oracle(
    x: np.ndarray, params: Any, config: LayersConfig, past: Any, window: int, causal: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One decoder layer of one batch row after `past` keys and values; rows, new keys, values."""
    attn, eps, start = params["self_attn"], config.norm_eps, len(past[0])
    heads, kv_heads = config.num_heads, config.num_kv_heads

    def linear(rows: np.ndarray, one: Any) -> np.ndarray:
        return rows @ np.asarray(one["weight"], np.float64).T + np.asarray(one.get("bias", 0.0))

    normed = oracles.rms_norm(x, params["input_layernorm"]["weight"], eps)
    qkv = linear(normed, attn["qkv_proj"]).reshape(len(x), -1, config.head_dim)
    query, key, value = np.split(qkv, [heads, heads + kv_heads], axis=1)
    places = start + np.arange(len(x))
    if config.qk_norm:
        query = oracles.rms_norm(query, attn["q_norm"]["weight"], eps)
        key = oracles.rms_norm(key, attn["k_norm"]["weight"], eps)
    query, key = (oracles.rotate(rows, places, config.rope) for rows in (query, key))
    distance = places[:, None] - np.arange(start + len(x))
    visible = (distance >= 0) | (not causal)
    visible &= (distance < window) | (window == 0)
    mixed = oracles.attention(query, np.r_[past[0], key], np.r_[past[1], value], visible)
    x = x + linear(mixed.reshape(len(x), -1), attn["o_proj"])
    normed = oracles.rms_norm(x, params["post_attention_layernorm"]["weight"], eps)
    gate, up = np.split(linear(normed, params["mlp"]["gate_up_proj"]), 2, axis=-1)
    return x + linear(gate / (1 + np.exp(-gate)) * up, params["mlp"]["down_proj"]), key, value


@pytest.mark.parametrize(
    ("changes", "window", "causal"),
    [
        ({}, 0, True),
        ({"num_heads": 4, "num_kv_heads": 2, "qkv_bias": True, "output_bias": True}, 0, False),
        ({"num_heads": 3, "num_kv_heads": 3, "qk_norm": False, "rope": ROPES["yarn"]}, 6, True),
        ({"rope": ROPES["llama3"], "head_dim": 10}, 3, False),
    ],
)
def test_a_decoder_layer_over_a_ragged_cache(
    changes: dict[str, Any], window: int, causal: bool
) -> None:
    config = tiny_layers(**changes)
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda leaf: jnp.asarray(rng.normal(size=leaf.shape) * 0.4, jnp.float32),
        layers.abstract_params(layers.DecoderLayer, config, "float32"),
    )
    shape = (len(START), 20, config.num_kv_heads, config.head_dim)
    caches = [rng.normal(size=shape).astype(np.float32) for _ in range(2)]  # garbage past START
    x = rng.normal(size=(len(START), ROWS, config.hidden_size)).astype(np.float32)
    start = jnp.array(START)
    layer = layers.bind(layers.DecoderLayer, config, "float32", params)
    rope = layers.rope_table(config.rope, config.head_dim, start[:, None] + jnp.arange(ROWS))
    mask = {"window": window, "causal": causal, "implementation": "xla"}
    out, *written = layer(jnp.asarray(x), rope, *map(jnp.asarray, caches), start, **mask)
    for b, cached in enumerate(START):
        past = [cache[b, :cached].astype(np.float64) for cache in caches]
        expected, *fresh = layer_oracle(x[b], params, config, past, window, causal)
        np.testing.assert_allclose(out[b], expected, atol=2e-5 * np.abs(expected).max())
        for cache, before, rows in zip(written, caches, fresh, strict=True):
            np.testing.assert_allclose(cache[b, cached : cached + ROWS], rows, atol=1e-5)
            after = np.delete(np.asarray(cache[b]), np.s_[cached : cached + ROWS], axis=0)
            kept = np.delete(before[b], np.s_[cached : cached + ROWS], axis=0)
            np.testing.assert_array_equal(after, kept)


def test_parameters_are_named_by_strings_and_bound_by_name() -> None:
    config = tiny_layers()
    shapes = layers.abstract_params(layers.DecoderLayer, config, "bfloat16")
    assert shapes["self_attn"]["qkv_proj"]["weight"].shape == (24, 12)
    assert {leaf.dtype for leaf in jax.tree.leaves(shapes)} == {jnp.dtype("bfloat16")}
    params = jax.tree.map(lambda leaf: jnp.full(leaf.shape, 3, leaf.dtype), shapes)
    bound = layers.bind(layers.DecoderLayer, config, "bfloat16", params)
    np.testing.assert_array_equal(
        bound.mlp.down_proj.weight[...], params["mlp"]["down_proj"]["weight"]
    )
