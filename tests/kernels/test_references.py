"""The jax.numpy reference of each op against a float64 oracle; runs everywhere."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.block_attention import block_attention, length_tiers
from pallas_kernels.context_kv import context_kv
from pallas_kernels.fused_matmul import fused_matmul
from pallas_kernels.markov_walk import markov_walk
from pallas_kernels.qkv_write import qkv_write
from tests.kernels import oracle

TOLERANCE = {jnp.float32: 2e-6, jnp.bfloat16: 1e-2}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rows", [1, 3, 7, 8, 16, 40])
@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("causal", [True, False])
def test_attention(dtype, rows, window, causal):
    rng = np.random.default_rng(rows)
    cache_rows = 300
    start = [0, 1, 127, 128, 129, cache_rows - rows]
    operands = oracle.attention_operands(rng, (6, rows, 4, 16), 2, cache_rows, start, dtype)
    actual = block_attention(*operands, causal=causal, window=window, implementation="xla")
    expected = oracle.attention(*operands, causal=causal, window=window)
    assert actual.dtype == dtype
    assert oracle.relative_error(actual, expected) < TOLERANCE[dtype]


def test_attention_reads_the_smallest_tier_that_holds_the_longest_row():
    assert length_tiers(256) == (256,)
    assert length_tiers(5000) == (256, 1024, 4096, 5000)
    rng = np.random.default_rng(0)
    for longest in (255, 256, 257, 1023, 1024, 1025):
        shape, start = (2, 1, 2, 8), [3, longest - 1]
        operands = oracle.attention_operands(rng, shape, 1, 1100, start, jnp.float32)
        actual = jax.jit(lambda *x: block_attention(*x, causal=True))(*operands)
        expected = oracle.attention(*operands, causal=True)
        assert oracle.relative_error(actual, expected) < 2e-6


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("norm", [True, False])
def test_qkv_write(dtype, norm):
    rng = np.random.default_rng(1)
    x = oracle.head_operands(rng, 3, 5, 8, (20, 2, 16), dtype)
    norms = (x["norm"], x["norm"][::-1]) if norm else (None, None)
    start = jnp.array([0, 3, 17], jnp.int32)  # the last row writes past the cache's end
    operands = (x["x"], *norms, x["cos"], x["sin"], x["k_cache"], x["v_cache"], start)
    for actual, expected in zip(qkv_write(*operands), oracle.qkv_write(*operands), strict=True):
        assert actual.dtype == dtype
        assert oracle.relative_error(actual, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("norm", [True, False])
def test_context_kv(dtype, norm):
    rng = np.random.default_rng(2)
    layers = 3
    x = [oracle.head_operands(rng, 4, 5, layers * 4, (20, 2, 16), dtype) for _ in range(layers)]
    norms = jnp.stack([y["norm"] for y in x]) if norm else None
    caches = [[y[name] for y in x] for name in ("k_cache", "v_cache")]
    start, count = jnp.array([0, 3, 15, 9], jnp.int32), jnp.array([0, 2, 5, 3], jnp.int32)
    kv = x[0]["x"]
    poisoned = jnp.where(jnp.arange(5)[:, None] < count[:, None, None], kv, oracle.POISON)
    angles = (x[0]["cos"], x[0]["sin"])
    actual = context_kv(poisoned.astype(dtype), norms, *angles, *caches, start, count)
    expected = oracle.context_kv(kv, norms, *angles, *caches, start, count)
    for written, wanted in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert oracle.relative_error(written, wanted) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("noise", [True, False])
def test_markov_walk(dtype, noise):
    rng = np.random.default_rng(3)
    operands = oracle.walk_operands(rng, (3, 4, 101), 16, noise=noise, dtype=dtype)
    tokens, logits = markov_walk(*operands)
    expected_tokens, expected, margin = oracle.markov_walk(*operands)
    assert margin > 1e-4  # no tie, so that rounding cannot turn a token
    assert tokens.tolist() == expected_tokens.tolist()
    assert oracle.relative_error(logits, expected) < 2e-6  # products of bfloat16 add in float32


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("gated", [True, False])
def test_fused_matmul(dtype, gated):
    rng = np.random.default_rng(4)
    operands = oracle.matmul_operands(rng, (2, 3, 32), 20, dtype)
    actual = fused_matmul(*operands, gated=gated)
    assert actual.dtype == dtype
    expected = oracle.fused_matmul(*operands, gated=gated)
    assert oracle.relative_error(actual, expected) < TOLERANCE[dtype]


def test_the_lowest_of_equal_tokens_is_taken():
    base = jnp.zeros((1, 2, 8)).at[0, :, jnp.array([3, 5])].set(1.0)
    zeros = jnp.zeros((8, 4))
    tokens, _ = markov_walk(base, zeros, zeros, jnp.zeros(1, jnp.int32))
    assert tokens.tolist() == [[3, 3]]


def test_bad_shapes_are_named():
    q, cache = jnp.zeros((1, 2, 3, 8)), jnp.zeros((1, 4, 2, 8))
    start = jnp.zeros(1, jnp.int32)
    with pytest.raises(ValueError, match="do not fit the key cache"):
        block_attention(q, cache, cache, start, causal=True)
    with pytest.raises(ValueError, match="do not fit a cache of 4 rows"):
        block_attention(jnp.zeros((1, 5, 2, 8)), cache, cache, start, causal=True)
    angle = jnp.zeros((1, 2, 4))
    with pytest.raises(ValueError, match="does not fit caches"):
        qkv_write(jnp.zeros((1, 2, 32)), None, None, angle, angle, cache, cache, start)
    with pytest.raises(ValueError, match="both be given or both be None"):
        qkv_write(jnp.zeros((1, 2, 40)), angle, None, angle, angle, cache, cache, start)
    base, head = jnp.zeros((1, 2, 8)), jnp.zeros((8, 4))
    with pytest.raises(ValueError, match="do not fit logits"):
        markov_walk(base, head, head[:7], start)
    with pytest.raises(ValueError, match="noise and scale must both be given"):
        markov_walk(base, head, head, start, base)
    with pytest.raises(ValueError, match="does not fit 1 key and 1 value caches"):
        context_kv(jnp.zeros((1, 2, 40)), None, angle, angle, [cache], [cache], start, start)
    with pytest.raises(ValueError, match="do not fit"):
        fused_matmul(jnp.zeros((2, 8)), jnp.zeros(8), jnp.zeros((4, 6)))
    with pytest.raises(ValueError, match="even number of rows, got 5"):
        fused_matmul(jnp.zeros((2, 8)), jnp.zeros(8), jnp.zeros((5, 8)), gated=True)
