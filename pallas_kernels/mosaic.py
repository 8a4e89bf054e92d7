"""What the kernels share of Mosaic GPU: the launch, layouts, and loads that both jax versions take.

Kernels run in interpret mode inside `plgpu.force_gpu_interpret_mode`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

WARPS = 4  # of a warpgroup, which is what runs one kernel body
LANES = 32

# jax 0.10 requires an index that jax 0.11 deprecates.
_INDEX = inspect.signature(plgpu.load).parameters["idx"].default is inspect.Parameter.empty


def launch(
    body: Callable[..., None],
    *,
    name: str,
    grid: Mapping[str, int],
    out_type: Any = (),
    scratch_types: Sequence[Any] = (),
) -> Callable[..., Any]:
    """Return a function that runs `body` on every cell of `grid`, one warpgroup each.

    The body gets references to the operands, the outputs and the scratch. An operand that is a
    reference itself is written in place.
    """
    mesh = plgpu.Mesh(grid=tuple(grid.values()), grid_names=tuple(grid))

    def scoped(*refs: Any) -> None:
        pl.run_scoped(partial(body, *refs), *scratch_types)

    return pl.kernel(
        scoped,
        out_type=out_type,
        mesh=mesh,
        name=name,
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup, approx_math=True
        ),
    )


def load(ref: Any, layout: Any) -> Any:
    """Load from device memory into registers of a given layout."""
    index = ((),) if _INDEX else ()
    return plgpu.load(ref, *index, layout=layout, optimized=False)


def matrix_tiles(width: int = 64) -> tuple[Any, ...]:
    """Return the shared-memory transforms of a wgmma operand with 2-byte elements.

    `width=32` is the same tile for 4-byte elements.
    """
    return (plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(128))


def row_layout(rows: int, width: int) -> Any:
    """Return the register layout that gives each warp whole rows of `[rows, width]`.

    Two rows go to two warps each, and one row to all four: they load and store the same values.
    """
    rows = min(rows, WARPS)
    warps: dict[int, tuple[Any, ...]] = {
        4: (-3,),
        2: (-3, plgpu.Replicated(2)),
        1: (plgpu.Replicated(WARPS),),
    }
    vector = min(width, 128) // LANES
    return plgpu.Layout.TILED(
        plgpu.Tiling(((rows, vector * LANES), (vector,))),
        warp_dims=warps[rows],
        lane_dims=(-2,),
        vector_dim=-1,
    )
