"""Block sizes by device: the tuned table of an op, one JSON file a device."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any

from pallas_kernels.platform import default_device


def device_file(device: Any) -> str:
    """Return the name of a device's table: `nvidia_h200.json` for an NVIDIA H200."""
    return device.device_kind.lower().replace(" ", "_").replace("-", "_") + ".json"


@cache
def read_table(name: str) -> dict[str, dict[str, dict[str, Any]]]:
    """Read a table: op -> shape -> fields of its Config. Empty when the device has none."""
    path = files("pallas_kernels") / "tuned" / name
    if not path.is_file():
        return {}
    table: dict[str, dict[str, dict[str, Any]]] = json.loads(path.read_text())
    return table


def tuned(op: str, shape: str) -> dict[str, Any] | None:
    """Return the tuned fields for a shape on the default device, or None."""
    return read_table(device_file(default_device())).get(op, {}).get(shape)
