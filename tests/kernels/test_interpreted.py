"""The kernels themselves, run on the CPU with a race detector (jax 0.11)."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import block_attention, context_kv, fused_matmul, markov_walk, qkv_write
from tests.kernels import oracle

pytestmark = pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="jax 0.10 has no interpreter for these kernels"
)
ERROR = 1e-2  # of bfloat16, relative to the largest value


@pytest.fixture(autouse=True)
def interpreter():
    """Interpret kernels inside a test, and fail it if two threads raced."""
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as state
    from jax.experimental.pallas import mosaic_gpu as plgpu

    state.reset_gpu_interpret_mode_state()
    with (
        warnings.catch_warnings(),
        plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)),
    ):
        yield
        assert not state.get_races().races_found
    state.reset_gpu_interpret_mode_state()


@pytest.mark.parametrize(
    ("shape", "kv_heads", "start", "mask", "sizes"),
    [
        ((3, 8, 4, 64), 2, [0, 127, 312], {"causal": True}, {"slots": 16}),
        ((3, 7, 2, 64), 1, [1, 128, 129], {"causal": False}, {"slots": 8, "stages": 2}),
        ((2, 1, 6, 64), 2, [319, 200], {"causal": True}, {"slots": 2}),
        ((18, 1, 2, 64), 1, [16 * b for b in range(17)] + [319], {"causal": True}, {"slots": 24}),
        ((1, 3, 8, 128), 1, [250], {"causal": True}, {"slots": 3, "block": 128, "stages": 1}),
        ((2, 16, 8, 64), 1, [100, 304], {"causal": True, "window": 70}, {"slots": 8}),
        ((1, 12, 2, 64), 1, [130], {"causal": False}, {"slots": 2}),
        ((1, 8, 2, 256), 1, [190], {"causal": False, "window": 100}, {"slots": 4, "stages": 2}),
    ],
)
def test_attention(shape, kv_heads, start, mask, sizes):
    rng = np.random.default_rng(shape[1])
    operands = oracle.attention_operands(rng, shape, kv_heads, 320, start)
    config = block_attention.Config(**sizes, weights_in_registers=False)
    actual = block_attention.block_attention_kernel(*operands, **mask, config=config)
    assert oracle.relative_error(actual, oracle.attention(*operands, **mask)) < ERROR


@pytest.mark.parametrize(
    ("rows", "cache", "heads", "group", "norm"),
    [
        (8, (40, 4, 128), 16, 4, True),
        (7, (40, 2, 64), 10, 2, True),
        (1, (40, 8, 64), 24, 8, False),
    ],
)
def test_qkv_write(rows, cache, heads, group, norm):
    rng = np.random.default_rng(rows)
    x = oracle.head_operands(rng, 3, rows, heads, cache)
    norms = (x["norm"], x["norm"][::-1]) if norm else (None, None)
    start = jnp.array([0, 3, 39], jnp.int32)  # the last row writes past the cache's end
    operands = (x["x"], *norms, x["cos"], x["sin"], x["k_cache"], x["v_cache"], start)
    actual = qkv_write.qkv_write_kernel(*operands, eps=1e-6, config=qkv_write.Config(group))
    for written, expected in zip(actual, oracle.qkv_write(*operands), strict=True):
        assert oracle.relative_error(written, expected) < ERROR


@pytest.mark.parametrize(
    ("rows", "cache", "group", "norm"),
    [(8, (40, 4, 128), 4, True), (3, (40, 2, 64), 2, False)],
)
def test_context_kv(rows, cache, group, norm):
    rng = np.random.default_rng(rows)
    x = [oracle.head_operands(rng, 3, rows, 4 * cache[1], cache) for _ in range(2)]
    norms = jnp.stack([y["norm"] for y in x]) if norm else None
    caches = [[y[name] for y in x] for name in ("k_cache", "v_cache")]
    start, count = jnp.array([0, 3, 31], jnp.int32), jnp.array([0, 2, rows], jnp.int32)
    kv = jnp.where(jnp.arange(rows)[:, None] < count[:, None, None], x[0]["x"], oracle.POISON)
    operands = (kv.astype(jnp.bfloat16), norms, x[0]["cos"], x[0]["sin"], *caches, start, count)
    config = qkv_write.Config(group)
    actual = context_kv.context_kv_kernel(*operands, eps=1e-6, config=config)
    expected = oracle.context_kv(*operands)
    for written, wanted in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert oracle.relative_error(written, wanted) < ERROR


@pytest.mark.parametrize(
    ("shape", "rank", "noise", "sizes"),
    [
        ((1, 3, 520), 64, False, (3, 2)),
        ((3, 3, 328), 64, True, (5, 1)),
        ((8, 2, 256), 128, True, (2, 2)),
    ],
)
def test_markov_walk(shape, rank, noise, sizes):
    rng = np.random.default_rng(shape[2])
    operands = oracle.walk_operands(rng, shape, rank, noise=noise)
    tokens, logits = markov_walk.markov_walk_kernel(*operands, config=markov_walk.Config(*sizes))
    expected_tokens, expected, margin = oracle.markov_walk(*operands)
    assert margin > 1e-4
    assert tokens.tolist() == expected_tokens.tolist()
    assert oracle.relative_error(logits, expected) < 2e-6


@pytest.mark.parametrize(
    ("rows", "width", "out", "gated", "sizes"),
    [
        (16, 128, 384, True, (2, 64, 4)),
        (14, 128, 128, False, (2, 64, 2)),
        (8, 128, 384, True, (4, 128, 2)),
        (3, 192, 384, False, (4, 64, 3)),
        (1, 64, 640, True, (5, 64, 2)),
    ],
)
def test_fused_matmul(rows, width, out, gated, sizes):
    rng = np.random.default_rng(out)
    operands = oracle.matmul_operands(rng, (rows, width), out)
    config = fused_matmul.Config(*sizes)
    actual = fused_matmul.fused_matmul_kernel(*operands, gated=gated, eps=1e-6, config=config)
    expected = oracle.fused_matmul(*operands, gated=gated)
    assert oracle.relative_error(actual, expected) < ERROR
