"""What only a Hopper GPU can tell: the kernels' numbers, and the text of a whole run."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import SamplingParams, compiler, load
from dspark_jax.costs import save_costs
from dspark_jax.tiers import BatchCosts
from pallas_kernels.block_attention import block_attention
from pallas_kernels.context_kv import context_kv
from pallas_kernels.fused_matmul import fused_matmul
from pallas_kernels.markov_walk import markov_walk
from pallas_kernels.qkv_write import qkv_write
from tests.kernels import oracle

pytestmark = pytest.mark.gpu
ERROR = 1e-2  # of bfloat16, relative to the largest value
LENGTHS = [0, 1, 55, 127, 128, 129, 2047, 2048, 4095, 8184]


@pytest.mark.parametrize("batch", [1, len(LENGTHS)])
@pytest.mark.parametrize(
    ("rows", "mask"),
    [
        (1, {"causal": True}),
        (3, {"causal": True}),
        (7, {"causal": False}),
        (8, {"causal": True}),
        (12, {"causal": False}),
        (16, {"causal": True}),
        (8, {"causal": True, "window": 512}),
    ],
)
def test_attention(batch, rows, mask):
    rng = np.random.default_rng(rows)
    start = [min(n, 8192 - rows) for n in LENGTHS[-batch:]]
    operands = oracle.attention_operands(rng, (batch, rows, 8, 128), 2, 8192, start)
    actual = block_attention(*operands, **mask, implementation="pallas")
    assert oracle.relative_error(actual, oracle.attention(*operands, **mask)) < ERROR


@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(6, 2, 64), (4, 2, 256), (16, 2, 128)])
def test_attention_of_other_heads(heads, kv_heads, width):
    rng = np.random.default_rng(width)
    operands = oracle.attention_operands(rng, (2, 8, heads, width), kv_heads, 1024, [0, 900])
    actual = block_attention(*operands, causal=True, implementation="pallas")
    assert oracle.relative_error(actual, oracle.attention(*operands, causal=True)) < ERROR


@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(32, 8, 128), (32, 8, 64), (6, 2, 64)])
@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("start", [[0, 0], [1, 130], [512, 1023], [3000, 17]])
def test_prompt_chunks_by_cudnn(start, window, heads, kv_heads, width):
    rng = np.random.default_rng(width)
    shape = (2, 64, heads, width)
    operands = oracle.attention_operands(rng, shape, kv_heads, 3072, start)
    actual = jax.jit(lambda *x: block_attention(*x, causal=True, window=window))(*operands)
    mask = {"causal": True, "window": window}
    reference = block_attention(*operands, **mask, implementation="xla")
    assert oracle.relative_error(actual, oracle.exact(reference)) < ERROR
    assert oracle.relative_error(actual, oracle.attention(*operands, **mask)) < ERROR


def test_a_long_prompt_says_the_same_with_and_without_cudnn():
    ids = [int(token) for token in np.random.default_rng(0).integers(4000, size=200)]
    params = SamplingParams(max_tokens=8, temperature=0.0, logprobs=2)
    found = []
    for implementation in ("auto", "xla"):
        engine = load(
            dtype="bfloat16", max_length=504, prefill_chunk=64, implementation=implementation
        )
        found.append(engine.generate([ids], params)[0].logprobs[0])
    assert max(abs(found[0][token] - found[1][token]) for token in found[0].keys() & found[1]) < 0.1


@pytest.mark.parametrize("rows", [1, 7, 8])
def test_cache_writes(rows):
    rng = np.random.default_rng(rows)
    cache = (64, 8, 128)
    x = oracle.head_operands(rng, 3, rows, 48, cache)
    start = jnp.array([0, 3, 63], jnp.int32)
    norms, angles = (x["norm"], x["norm"][::-1]), (x["cos"], x["sin"])
    operands = (x["x"], *norms, *angles, x["k_cache"], x["v_cache"], start)
    actual = qkv_write(*operands, implementation="pallas")
    for written, expected in zip(actual, oracle.qkv_write(*operands), strict=True):
        assert oracle.relative_error(written, expected) < ERROR
    start, count = jnp.array([0, 3, 40], jnp.int32), jnp.array([0, 1, rows], jnp.int32)
    caches = [[x["k_cache"]] * 3, [x["v_cache"]] * 3]
    operands = (x["x"], jnp.stack([x["norm"]] * 3), *angles, *caches, start, count)
    k_caches, v_caches = context_kv(*operands, implementation="pallas")
    k_wanted, v_wanted = oracle.context_kv(*operands)
    for written, wanted in zip(k_caches + v_caches, k_wanted + v_wanted, strict=True):
        assert oracle.relative_error(written, wanted) < ERROR


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(("rows", "width"), [(1, 4096), (7, 2560), (8, 4096), (16, 1024)])
def test_fused_matmul(rows, width, gated):
    rng = np.random.default_rng(rows)
    operands = oracle.matmul_operands(rng, (1, rows, width), 9728)
    actual = fused_matmul(*operands, gated=gated, implementation="pallas")
    assert oracle.relative_error(actual, oracle.fused_matmul(*operands, gated=gated)) < ERROR


@pytest.mark.parametrize("noise", [True, False])
@pytest.mark.parametrize("batch", [1, 3, 16])
def test_markov_walk(batch, noise):
    rng = np.random.default_rng(batch)
    operands = oracle.walk_operands(rng, (batch, 4, 12000), 256, noise=noise)
    tokens, logits = markov_walk(*operands, implementation="pallas")
    expected_tokens, expected, margin = oracle.markov_walk(*operands)
    assert margin > 1e-5
    assert tokens.tolist() == expected_tokens.tolist()
    assert oracle.relative_error(logits, expected) < 5e-6


def test_the_embedded_pair_says_the_same_with_and_without_kernels():
    prompts = ["def quicksort(items):", "Once upon a time", "The", "1 2 3 4 5"]
    params = SamplingParams(max_tokens=96, temperature=0.0, logprobs=2)
    texts = []
    for implementation in ("pallas", "xla"):
        engine = load(dtype="bfloat16", max_length=504, implementation=implementation)
        texts.append(engine.generate(prompts, params))
    for kernels, reference in zip(*texts, strict=True):
        pairs = list(zip(kernels.token_ids, reference.token_ids, strict=False))
        first = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if first is None:
            assert kernels.token_ids == reference.token_ids
            continue
        best = sorted(reference.logprobs[first].values())[-2:]
        assert best[1] - best[0] < 0.05  # the two best are closer than bfloat16 tells apart


@pytest.mark.parametrize(
    "decoding", [{"rejection": "block"}, {"rejection": "gumbel", "verification": "scheduled"}]
)
def test_one_graph_says_what_its_kernels_say_one_by_one(monkeypatch, tmp_path, decoding):
    """Loops and choices inside a CUDA graph: of rounds, tiers, truncations and penalties."""
    sizes = {"dtype": "float32", "max_length": 248}
    if decoding.get("verification") == "scheduled":
        config = load(**sizes).config  # for seven drafts, so blocks of eight
        table = [  # two tiers, as each is compiled
            BatchCosts(rows, 4.0 + rows, (4 * rows, 8 * rows), (6.5 + 4 * rows, 6.5 + 8 * rows))
            for rows in (1, 2, 4, 8)
        ]
        decoding = decoding | {"costs": save_costs(table, config, tmp_path)}
    settings = {"top_p": 0.9, "top_k": 40, "min_p": 0.01, "repetition_penalty": 1.2}
    params = [
        SamplingParams(max_tokens=48, temperature=0.0),
        SamplingParams(max_tokens=48, temperature=1.0, seed=5),
        SamplingParams(max_tokens=48, temperature=0.8, seed=6, **settings),
    ]
    prompts = ["def quicksort(items):", "import os\n", "class Stack:\n"]
    tokens = []
    for graphs in (True, False):
        if not graphs:
            monkeypatch.setitem(compiler.OPTIONS, "xla_gpu_enable_command_buffer", "")
        engine = load(**sizes, **decoding)
        tokens.append([one.token_ids for one in engine.generate(prompts, params)])
    assert tokens[0] == tokens[1]
