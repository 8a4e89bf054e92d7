"""Which implementation of an op runs on which device, decided before anything is compiled."""

from __future__ import annotations

from typing import Any

import jax

IMPLEMENTATIONS = ("auto", "pallas", "xla")
KERNEL_CAPABILITY = "9.0"  # wgmma, which every matrix kernel here uses, exists nowhere else


def default_device() -> Any:
    """Return the device that unplaced computations run on."""
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


def resolve_implementation(implementation: str, device: Any = None) -> str:
    """Return "pallas" or "xla" for a device, by default the one that computations run on.

    `auto` takes the kernels on CUDA compute capability 9.0 and the reference everywhere else (a
    kernel compiled for another GPU would end the process).

    Raises:
        ValueError: `implementation` has another name, or `pallas` is named for a device that the
            kernels do not run on.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation must be one of {', '.join(IMPLEMENTATIONS)}, got {implementation!r}"
        )
    if implementation == "xla":
        return "xla"
    device = default_device() if device is None else device
    if runs_kernels(device):
        return "pallas"
    if implementation == "auto":
        return "xla"
    raise ValueError(
        f"implementation 'pallas' needs a GPU of compute capability {KERNEL_CAPABILITY} (H100,"
        f" H200), found {describe_device(device)}; use 'auto' or 'xla'"
    )
