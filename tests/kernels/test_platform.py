"""Which implementation runs where is decided before anything is compiled."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.block_attention import block_attention
from pallas_kernels.platform import decide_for, resolve_implementation


def gpu(capability):
    return SimpleNamespace(platform="gpu", device_kind="NVIDIA GPU", compute_capability=capability)


@pytest.mark.parametrize("capability", ["8.0", "8.9", "10.0", "12.0"])
def test_other_gpus_take_the_reference_and_refuse_kernels(capability):
    assert resolve_implementation("auto", gpu(capability)) == "xla"
    with pytest.raises(ValueError, match=f"found NVIDIA GPU of compute capability {capability}"):
        resolve_implementation("pallas", gpu(capability))


def test_hopper_takes_the_kernels():
    assert resolve_implementation("auto", gpu("9.0")) == "pallas"
    assert resolve_implementation("pallas", gpu("9.0")) == "pallas"
    assert resolve_implementation("xla", gpu("9.0")) == "xla"


def test_a_cpu_takes_the_reference_and_refuses_kernels():
    cpu = jax.devices("cpu")[0]
    assert resolve_implementation("auto", cpu) == "xla"
    with pytest.raises(ValueError, match=r"found cpu \(cpu\); use 'auto' or 'xla'"):
        resolve_implementation("pallas", cpu)


def test_operands_that_a_kernel_does_not_take():
    assert resolve_implementation("auto", gpu("9.0"), unsupported="too long") == "xla"
    with pytest.raises(ValueError, match="too long; use 'auto' or 'xla'"):
        resolve_implementation("pallas", gpu("9.0"), unsupported="too long")
    q, cache = jnp.zeros((1, 2, 2, 64)), jnp.zeros((1, 16, 2, 64))
    with decide_for(gpu("9.0")), pytest.raises(ValueError, match="takes bfloat16, got float32"):
        block_attention(
            q, cache, cache, jnp.zeros(1, jnp.int32), causal=True, implementation="pallas"
        )


def test_an_unknown_name_is_refused():
    with pytest.raises(ValueError, match="must be one of auto, pallas, xla, got 'triton'"):
        resolve_implementation("triton")
