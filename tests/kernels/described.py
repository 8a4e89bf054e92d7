"""GPUs that are not present: compile for them, and read what came out."""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path
from typing import Any

import jax
import pytest

from dspark_jax.compiler import compiler_options

_HOPPER_OR_LATER = {"9.0": ("NVIDIA H200", 132), "10.0": ("NVIDIA B200", 148)}
_DESCRIPTION = """gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: {cores}
  fpus_per_core: 128 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535 memory_bandwidth: 4814000000000 l2_cache_size: 62914560
  clock_rate_ghz: 1.98 device_memory_size: 150000000000
  shared_memory_per_block_optin: {shared} registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0" }}
platform_name: "CUDA" runtime_version {{ major: 13 }}
dnn_version_info {{ major: 9 minor: 28 patch: 1 }}
device_description_str: "{name}\""""
_SHARED = {"8.0": 166912, "8.9": 101376, "12.0": 101376}


def can_describe() -> bool:
    """Return whether this environment compiles for a GPU that is not present."""
    if jax.__version_info__ < (0, 11) or jax.config.jax_platforms != "cpu":
        return False
    try:
        import jax_cuda13_plugin  # noqa: F401
    except ImportError:
        return False
    return True


needs_compiler = pytest.mark.skipif(
    not can_describe(),
    reason="needs jax 0.11 with its CUDA plugin (Python 3.12) and JAX_PLATFORMS=cpu",
)


def described_device(capability: str = "9.0") -> Any:
    """Return a GPU of a compute capability, to compile for."""
    return described_devices(1, capability)[0]


@cache
def described_devices(count: int, capability: str = "9.0") -> Any:
    """Return some GPUs of one host."""
    from jax.experimental import topologies

    name, cores = _HOPPER_OR_LATER.get(capability, ("NVIDIA GPU", 108))
    major, minor = capability.split(".")
    description = _DESCRIPTION.format(
        name=name, cores=cores, major=major, minor=minor, shared=_SHARED.get(capability, 232448)
    )
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=description, topology=f"1x1x{count}"
    )
    return topology.devices


def compile_for(
    device: Any,
    function: Any,
    *operands: Any,
    donate: tuple[int, ...] = (),
    options: dict[str, Any] | None = None,
) -> str:
    """Compile a function for a described device and return its optimized HLO."""
    mesh = jax.sharding.Mesh([device], ("device",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), operands
    )
    lowered = jax.jit(function, donate_argnums=donate).lower(*shapes)
    return lowered.compile(options).as_text()


def compile_with_report(
    capfd: pytest.CaptureFixture[str], function: Any, *operands: Any, donate: tuple[int, ...] = ()
) -> tuple[str, str]:
    """Compile for an H200; return the optimized HLO and the assembler's report of resources."""
    os.environ["MOSAIC_GPU_DUMP_PTXAS"] = "1"
    try:
        program = compile_for(described_device(), function, *operands, donate=donate)
    finally:
        del os.environ["MOSAIC_GPU_DUMP_PTXAS"]
    out, err = capfd.readouterr()
    return program, out + err


def dump_to(folder: Path) -> dict[str, Any]:
    """Return the library's compiler options, and those that leave `graphs_of` what it reads."""
    return {**compiler_options(), "xla_dump_to": str(folder), "xla_dump_hlo_as_text": True}


def graphs_of(folder: Path) -> list[str]:
    """Return what a dumped program runs one after the other: CUDA graphs, and what is in none.

    A loop in a graph must compute its condition: XLA orders the test after that computation, and
    after nothing else.
    """
    (file,) = folder.glob("*thunk_sequence_after_thunk_passes.txt")
    thunks = file.read_text()
    assert "No thunks" not in thunks, "the condition of a loop computes nothing"
    return re.findall(r"^\d+: (k\w+)", thunks, re.MULTILINE)


def spilled_bytes(report: str) -> int:
    """Sum the bytes that an assembler's report says are spilled; it must report something."""
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", report)
    assert spills, f"no resource report in {report!r}"
    return sum(int(stores) + int(loads) for stores, loads in spills)


def kernel_calls(program: str) -> int:
    return len(re.findall(r'custom_call_target="mosaic_gpu', program))


def copied_arrays(program: str, shape: tuple[int, ...]) -> int:
    """Count the copies of an array of this shape in an optimized program."""
    text = ",".join(str(n) for n in shape)
    return len(re.findall(rf"= \w+\[{re.escape(text)}\]\S* copy(?:-start)?\(", program))
