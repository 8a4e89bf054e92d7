"""Shapes of the published pairs, and random weights and states of them made on the device."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from dspark_jax.config import (
    DecodeConfig,
    DraftConfig,
    LayersConfig,
    ModelConfig,
    RopeConfig,
    TargetConfig,
)
from dspark_jax.decode import init_state
from dspark_jax.draft import Draft
from dspark_jax.layers import abstract_params
from dspark_jax.sharding import make_state, param_shardings
from dspark_jax.state import DecodeState, KVCache, Params
from dspark_jax.target import Target

Dtype = Literal["float32", "bfloat16"]
VOCABULARY = 151936
QWEN3 = LayersConfig(
    hidden_size=4096,
    intermediate_size=12288,
    num_layers=36,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rope=RopeConfig(theta=1e6),
)
# hidden, MLP, layers, query heads, tied, taps
SIZES: dict[str, tuple[int, int, int, int, bool, tuple[int, ...]]] = {
    "qwen3-0.6b": (1024, 3072, 28, 16, True, (1, 7, 13, 19, 25)),
    "qwen3-4b": (2560, 9728, 36, 32, True, (1, 9, 17, 25, 33)),
    "qwen3-8b": (4096, 12288, 36, 32, False, (1, 9, 17, 25, 33)),
    "qwen3-14b": (5120, 17408, 40, 40, False, (1, 10, 19, 28, 37)),
}


def model_config(name: str, *, dtype: Dtype = "bfloat16", **decoding: Any) -> ModelConfig:
    """A pair of the published shapes: a draft of 5 layers, block 7, vanilla head of rank 256."""
    width, mlp, depth, heads, tied, taps = SIZES[name]
    layers = replace(
        QWEN3,
        hidden_size=width,
        intermediate_size=mlp,
        num_layers=depth,
        num_heads=heads,
        windows=(),
    )
    target = TargetConfig(layers, VOCABULARY, max_length=131072, tied=tied)
    draft = DraftConfig(
        layers=replace(layers, num_layers=5, windows=()),
        vocab_size=VOCABULARY,
        draft_vocab_size=VOCABULARY,
        block_size=7,
        mask_token_id=151669,
        taps=taps,
        target_hidden_size=width,
        markov="vanilla",
        markov_rank=256,
        confidence="markov",
    )
    settings = {"num_drafts": 7, "prefill_chunk": 512} | decoding
    return ModelConfig(target, draft, DecodeConfig(**settings), dtype)


def plain(config: ModelConfig) -> ModelConfig:
    """The same target without a draft."""
    decode = replace(
        config.decode, num_drafts=0, confidence_threshold=0.0, costs=(), temperatures=()
    )
    return replace(config, draft=None, decode=decode)


@partial(jax.jit, static_argnums=(1, 2))
def _normal(key: jax.Array, shape: tuple[int, ...], dtype: str) -> jax.Array:
    return jax.random.normal(key, shape, dtype) * 0.02


def _keys() -> Iterator[jax.Array]:
    key = jax.random.key(0)
    while True:
        key, one = jax.random.split(key)
        yield one


def random_params(config: ModelConfig, mesh: Mesh | None = None) -> Params:
    """Random weights; norms are one, so that activations stay finite through any depth.

    On a mesh each is born in its parts: no device ever holds what it will not keep.
    """
    keys = _keys()

    def fill(leaf: jax.ShapeDtypeStruct, place: Any = None) -> jax.Array:
        if len(leaf.shape) == 1:
            return jnp.ones(leaf.shape, leaf.dtype, device=place)
        if place is None:
            return _normal(next(keys), leaf.shape, leaf.dtype.name)
        draw = jax.jit(_normal, static_argnums=(1, 2), out_shardings=place)
        return draw(next(keys), leaf.shape, leaf.dtype.name)

    shapes = {"target": abstract_params(Target, config.target, config.dtype)}
    if config.draft:
        shapes["draft"] = abstract_params(Draft, config.draft, config.dtype)
    places = (param_shardings(shapes, mesh),) if mesh else ()
    return jax.tree.map(fill, shapes, *places)


def filled_state(
    config: ModelConfig, batch: int, cached: int, mesh: Mesh | None = None
) -> DecodeState:
    """A state whose rows all run with `cached` random rows in their caches."""
    return make_state(partial(_fill_state, config, batch, cached), mesh)


def _fill_state(config: ModelConfig, batch: int, cached: int) -> DecodeState:
    keys = _keys()
    state = init_state(config, batch)

    def random(zeros: jax.Array) -> jax.Array:
        shape, dtype = zeros.shape, zeros.dtype.name
        if not isinstance(zeros, jax.core.Tracer):  # a program for a mesh makes none
            zeros.delete()  # two caches at a time would be one too many
        return _normal(next(keys), shape, dtype)

    def fill(cache: KVCache) -> KVCache:
        return jax.tree.map(random, cache)

    return replace(
        state,
        target=fill(state.target),
        draft=fill(state.draft),
        cached=jnp.full((batch,), cached, jnp.int32),
        anchor=jnp.arange(batch, dtype=jnp.int32) + 1000,
        limit=jnp.full((batch,), config.decode.max_length, jnp.int32),
        done=jnp.zeros((batch,), bool),
    )


def tree_bytes(tree: Any) -> int:
    """Bytes of arrays on each device that holds them."""
    shapes = [(x.sharding.shard_shape(x.shape), x.dtype.itemsize) for x in jax.tree.leaves(tree)]
    return sum(math.prod(shape) * itemsize for shape, itemsize in shapes)
