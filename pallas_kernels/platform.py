"""Which implementation of an op runs on which device, decided before anything is compiled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax

IMPLEMENTATIONS = ("auto", "pallas", "xla")
KERNEL_CAPABILITY = "9.0"  # wgmma, which the attention kernel uses, exists nowhere else

_described: ContextVar[Any] = ContextVar("described_device", default=None)


@contextmanager
def decide_for(device: Any) -> Iterator[None]:
    """Decide for `device` inside the block, to compile for a device that is not present."""
    token = _described.set(device)
    try:
        yield
    finally:
        _described.reset(token)


def default_device() -> Any:
    """Return the device that decisions are for: the one that unplaced computations run on."""
    if (described := _described.get()) is not None:
        return described
    device: Any = jax.config.jax_default_device  # type: ignore[attr-defined]
    if device is None or isinstance(device, str):
        return jax.devices(device)[0]
    return device


def describe_device(device: Any) -> str:
    """Name a device for a message: its kind and, for a GPU, its compute capability."""
    capability = getattr(device, "compute_capability", None)
    if capability is None:
        return f"{device.platform} ({device.device_kind})"
    return f"{device.device_kind} of compute capability {capability}"


def runs_kernels(device: Any) -> bool:
    """Return whether the kernels run on `device`: CUDA of compute capability 9.0 only."""
    return str(getattr(device, "compute_capability", None)) == KERNEL_CAPABILITY


def cuda_capability(device: Any = None) -> tuple[int, int] | None:
    """Return the compute capability of `device` (by default the one in use); None without CUDA."""
    device = default_device() if device is None else device
    major, _, minor = str(getattr(device, "compute_capability", "")).partition(".")
    return (int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else None


def unroll_scans() -> bool:
    """Return whether scans over a block's slots are unrolled: on a GPU.

    XLA puts a loop that stacks its outputs into no CUDA graph, nor any loop around it. Elsewhere
    unrolling would cost compile time alone.
    """
    return default_device().platform == "gpu"


def implementation_for(dtype: str, implementation: str) -> str:
    """Return what "auto", "pallas" or "xla" runs at a dtype: the kernels take bfloat16."""
    return resolve_implementation(implementation) if dtype == "bfloat16" else "xla"


def resolve_implementation(
    implementation: str, device: Any = None, *, unsupported: str | None = None
) -> str:
    """Return "pallas" or "xla" for a device, by default the one that computations run on.

    `auto` takes the kernels on CUDA compute capability 9.0 and the reference everywhere else (a
    kernel compiled for another GPU would end the process). `unsupported` is an op's reason why
    its kernel cannot take these operands: `auto` then takes the reference.

    Raises:
        ValueError: `implementation` has another name, or `pallas` is named for a device that the
            kernels do not run on or for operands that the kernel does not take.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation must be one of {', '.join(IMPLEMENTATIONS)}, got {implementation!r}"
        )
    if implementation == "xla":
        return "xla"
    device = default_device() if device is None else device
    if implementation == "auto":
        return "pallas" if runs_kernels(device) and unsupported is None else "xla"
    if not runs_kernels(device):
        raise ValueError(
            f"implementation 'pallas' needs a GPU of compute capability {KERNEL_CAPABILITY}"
            f" (H100, H200), found {describe_device(device)}; use 'auto' or 'xla'"
        )
    if unsupported is not None:
        raise ValueError(f"{unsupported}; use 'auto' or 'xla'")
    return "pallas"
