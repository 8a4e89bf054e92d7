"""Every SPECS entry of every op as a function and the shapes of its operands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import block_attention, context_kv, fused_matmul, markov_walk, qkv_write


class Case(NamedTuple):
    name: str
    function: Callable[..., Any]  # of the operands, through the kernel
    operands: tuple[Any, ...]
    kept: tuple[int, ...]  # shape of what is written in place, or read
    donated: tuple[int, ...]  # which operands are written in place
    calls: int  # kernels a call


def _shape(*dims: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)


def _attention(spec: block_attention.Spec) -> Case:
    rows = -(-(spec.cached + spec.rows) // 64) * 64
    cache = (spec.batch, rows, spec.kv_heads, spec.head_dim)
    q = _shape(spec.batch, spec.rows, spec.heads, spec.head_dim)
    config = block_attention.choose_config(q.shape, spec.kv_heads)
    function = partial(
        block_attention.block_attention_kernel,
        causal=spec.causal,
        window=spec.window,
        config=config,
    )
    start = _shape(spec.batch, dtype=jnp.int32)
    return Case(str(spec), function, (q, _shape(*cache), _shape(*cache), start), cache, (), 2)


def _qkv(spec: qkv_write.Spec) -> Case:
    cache = (spec.batch, spec.cache_rows, spec.kv_heads, spec.head_dim)
    wide = (spec.heads + 2 * spec.kv_heads) * spec.head_dim
    norm = _shape(spec.head_dim) if spec.norm else None
    angle = _shape(spec.batch, spec.rows, spec.head_dim // 2, dtype=jnp.float32)
    config = qkv_write.choose_config(spec.batch * spec.rows, spec.kv_heads)
    function = partial(qkv_write.qkv_write_kernel, eps=1e-6, config=config)
    start = _shape(spec.batch, dtype=jnp.int32)
    x = _shape(spec.batch, spec.rows, wide)
    operands = (x, norm, norm, angle, angle, _shape(*cache), _shape(*cache), start)
    return Case(str(spec), function, operands, cache, (5, 6), 1)


def _context(spec: context_kv.Spec) -> Case:
    cache = (spec.batch, spec.cache_rows, spec.kv_heads, spec.head_dim)
    wide = spec.layers * 2 * spec.kv_heads * spec.head_dim
    norms = _shape(spec.layers, spec.head_dim) if spec.norm else None
    angle = _shape(spec.batch, spec.rows, spec.head_dim // 2, dtype=jnp.float32)
    config = context_kv.choose_config(spec.batch * spec.rows, spec.kv_heads)
    function = partial(context_kv.context_kv_kernel, eps=1e-6, config=config)
    counts = _shape(spec.batch, dtype=jnp.int32)
    caches = [_shape(*cache)] * spec.layers
    x = _shape(spec.batch, spec.rows, wide)
    operands = (x, norms, angle, angle, caches, caches, counts, counts)
    return Case(str(spec), function, operands, cache, (4, 5), 1)


def _walk(spec: markov_walk.Spec) -> Case:
    slots = min(spec.slots, 2)  # the first slot's kernel is one, those of all others are another
    logits = (spec.batch, slots, spec.vocabulary)
    base, head = _shape(*logits, dtype=jnp.float32), _shape(spec.vocabulary, spec.rank)
    operands = (base, head, head, _shape(spec.batch, dtype=jnp.int32))
    if spec.noise:
        operands = (*operands, base, _shape(spec.batch, dtype=jnp.float32))
    config = markov_walk.choose_config(spec.batch, spec.vocabulary, spec.rank)
    function = partial(markov_walk.markov_walk_kernel, config=config)
    return Case(str(spec), function, operands, logits, (0,), slots)


def _matmul(spec: fused_matmul.Spec) -> Case:
    sizes = (spec.rows, spec.width, spec.out, spec.gated)
    config = fused_matmul.choose_config(*sizes)
    function = partial(fused_matmul.fused_matmul_kernel, gated=spec.gated, eps=1e-6, config=config)
    weight = (spec.out, spec.width)
    operands = (_shape(spec.rows, spec.width), _shape(spec.width), _shape(*weight))
    return Case(str(spec), function, operands, weight, (), 1)


def cases() -> Iterator[Case]:
    yield from map(_attention, block_attention.SPECS)
    yield from map(_qkv, qkv_write.SPECS)
    yield from map(_context, context_kv.SPECS)
    yield from map(_walk, markov_walk.SPECS)
    yield from map(_matmul, fused_matmul.SPECS)
