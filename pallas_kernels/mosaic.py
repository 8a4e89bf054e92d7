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
    reduction_bytes: int = 2048,
) -> Callable[..., Any]:
    """Return a function that runs `body` on every cell of `grid`, one warpgroup each.

    The body gets references to the operands, the outputs and the scratch. An operand that is a
    reference itself is written in place. Reductions across warps pass through `reduction_bytes`
    of shared memory, in rounds if that is too little.
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
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
            approx_math=True,
            reduction_scratch_bytes=reduction_bytes,
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

    Of two rows each goes to two warps, and one row `[width]` goes to all four: these load and
    store the same values.
    """
    vector = min(width, 128) // LANES
    if rows == 1:
        tiling = plgpu.Tiling(((vector * LANES,), (vector,)))
        warps: tuple[Any, ...] = (plgpu.Replicated(WARPS),)
    else:
        rows = min(rows, WARPS)
        tiling = plgpu.Tiling(((rows, vector * LANES), (vector,)))
        warps = (-3,) if rows == WARPS else (-3, plgpu.Replicated(WARPS // rows))
    return plgpu.Layout.TILED(tiling, warp_dims=warps, lane_dims=(-2,), vector_dim=-1)
