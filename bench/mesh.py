"""The flags that spread a measurement over devices."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from jax.sharding import Mesh

from dspark_jax.sharding import make_mesh


def add_mesh_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that `mesh_of` reads."""
    add = parser.add_argument
    add("--tensor-parallel", type=int, default=1, metavar="N", help="devices that split it (1)")
    add("--data-parallel", type=int, default=1, metavar="N", help="devices that split --batch (1)")


def mesh_of(options: argparse.Namespace, batches: Sequence[int]) -> Mesh | None:
    """The mesh that was asked for; None on one device.

    Raises ValueError where there are fewer devices, or where a batch does not divide over them.
    """
    tensor, data = options.tensor_parallel, options.data_parallel
    if min(tensor, data) < 1:
        raise ValueError("--tensor-parallel and --data-parallel must be at least 1")
    for batch in batches:
        if batch % data:
            raise ValueError(f"--data-parallel {data} does not divide --batch {batch}")
    return make_mesh(tensor, data)


def shape_of(model: str, batch: int, cached: int, mesh: Mesh | None) -> dict[str, Any]:
    """The `shape` of a record; with a mesh the batch is that of all its devices."""
    shape: dict[str, Any] = {"model": model, "batch": batch, "cached": cached}
    return shape | {"mesh": dict(mesh.shape)} if mesh else shape
