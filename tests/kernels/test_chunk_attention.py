"""A prompt chunk's attention as cuDNN is asked for it, run by XLA against the float64 oracle."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.block_attention import block_attention
from pallas_kernels.chunk_attention import chunk_attention, chunk_tiers, cudnn_serves
from pallas_kernels.platform import decide_for
from tests.kernels import oracle

TOLERANCE = {jnp.float32: 2e-6, jnp.bfloat16: 1e-2}


def gpu(capability):
    return SimpleNamespace(platform="gpu", device_kind="NVIDIA", compute_capability=capability)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("start", [[0, 0], [0, 7], [240, 3], [557, 560]])
def test_against_the_oracle(start, window, dtype):
    rng = np.random.default_rng(len(start) + window)
    shape = (2, 40, 4, 16)
    operands = oracle.attention_operands(rng, shape, 2, 600, start, dtype)
    actual = jax.jit(lambda *x: chunk_attention(*x, window=window, implementation="xla"))(*operands)
    expected = oracle.attention(*operands, causal=True, window=window)
    assert actual.dtype == dtype
    assert oracle.relative_error(actual, expected) < TOLERANCE[dtype]


def test_lengths_read_are_at_most_a_quarter_above_what_is_needed():
    assert chunk_tiers(512, 4104) == (*range(512, 4097, 512), 4104)
    assert chunk_tiers(40, 300) == (256, 300)
    tiers = chunk_tiers(2048, 33288)
    assert tiers[6:] == (14336, 16384, 20480, 24576, 28672, 32768, 33288)
    for needed in range(2048, 33289, 8):
        read = next(length for length in tiers if length >= needed)
        assert read < needed + 2048 or read <= 1.25 * needed


@pytest.mark.parametrize(
    ("capability", "width", "dtype", "serves"),
    [
        ("9.0", 128, "bfloat16", True),
        ("9.0", 256, "bfloat16", True),
        ("8.0", 128, "float16", True),
        ("8.0", 256, "bfloat16", False),
        ("7.5", 64, "bfloat16", False),
        ("9.0", 128, "float32", False),
        ("9.0", 60, "bfloat16", False),
        ("gfx942", 128, "bfloat16", False),
    ],
)
def test_where_cudnn_serves(capability, width, dtype, serves):
    with decide_for(gpu(capability)):
        assert cudnn_serves(dtype, width) is serves
    assert cudnn_serves(dtype, width) is False  # a CPU


@pytest.mark.parametrize("implementation", ["auto", "xla"])
@pytest.mark.parametrize("rows", [16, 40])
@pytest.mark.parametrize("window", [0, 64])
def test_chunks_lower_to_cudnn_on_cuda(rows, implementation, window, monkeypatch):
    found = "jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version"
    monkeypatch.setattr(found, lambda: 91000)  # what a GPU's installation would say
    rng = np.random.default_rng(0)
    operands = oracle.attention_operands(rng, (1, rows, 32, 128), 8, 600, [100])

    def attend(*operands):
        return block_attention(*operands, causal=True, window=window, implementation=implementation)

    with decide_for(gpu("8.0")):
        lowered = jax.jit(attend).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
    chunk = implementation == "auto" and rows > 16
    assert lowered.count("__cudnn$fmhaSoftmax(") == chunk
    assert lowered.count("__cudnn$fmhaScaleBiasSoftmax(") == 3 * chunk  # 256, 512, 600 rows
