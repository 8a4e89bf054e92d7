"""The kernel of `fused_matmul`: each cell norms the rows and streams its tiles of the weight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic import launch, load, matrix_tiles, row_layout

TILE = 64  # weight rows of a wgmma


@dataclass(frozen=True)
class Problem:
    """Static geometry of the kernel."""

    rows: int
    width: int
    out: int  # weight rows
    gated: bool
    eps: float
    dtype: Any
    config: Any

    @property
    def padded(self) -> int:
        """Rows, padded for wgmma."""
        return -(-self.rows // 8) * 8

    @property
    def tiles(self) -> int:
        return self.out // TILE

    @property
    def cells(self) -> int:
        return min(self.config.cells, self.tiles)

    @property
    def steps(self) -> int:
        """Weight tiles along the width."""
        return self.width // self.config.depth

    @property
    def columns(self) -> int:
        """Result columns of a tile: gate and up rows share it."""
        return TILE // 2 if self.gated else TILE


class Scratch(NamedTuple):
    """Shared memory of a cell."""

    rows: Any
    norm: Any
    weights: Any
    sums: Any  # gate and up, on their way to one thread
    out: Any
    rows_ready: Any
    weights_ready: Any


def _scratch_types(problem: Problem) -> Scratch:
    config, padded = problem.config, problem.padded
    parts = 2 if problem.gated else 1
    return Scratch(
        rows=plgpu.SMEM(
            (problem.steps, padded, config.depth), problem.dtype, transforms=matrix_tiles()
        ),
        norm=plgpu.SMEM((problem.steps, config.depth), problem.dtype),
        weights=plgpu.SMEM(
            (config.stages, TILE, config.depth), problem.dtype, transforms=matrix_tiles()
        ),
        sums=plgpu.SMEM((padded, TILE), jnp.float32, transforms=matrix_tiles(32)),
        out=plgpu.SMEM((2, padded, problem.columns), problem.dtype),
        rows_ready=plgpu.Barrier(num_arrivals=problem.steps + 1),
        weights_ready=plgpu.Barrier(num_arrivals=parts, num_barriers=config.stages),
    )


def _normalize(scratch: Scratch, problem: Problem) -> None:
    """RMSNorm the rows in shared memory; each warp has rows of its own."""
    shape = (problem.padded, problem.config.depth)
    layout = row_layout(*shape)

    def wide(step: Any) -> Any:
        return load(scratch.rows.at[step], layout).astype(jnp.float32)

    square = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout)
    for step in range(problem.steps):
        value = wide(step)
        square = square + value * value
    scale = lax.rsqrt(square.sum(axis=1) / problem.width + problem.eps)
    scale = lax.broadcast_in_dim(scale, shape, [0])
    for step in range(problem.steps):
        rounded = (wide(step) * scale).astype(problem.dtype).astype(jnp.float32)
        factor = load(scratch.norm.at[step], layout.reduce(0)).astype(jnp.float32)
        value = rounded * lax.broadcast_in_dim(factor, shape, [1])
        scratch.rows.at[step][...] = value.astype(problem.dtype)
    plgpu.commit_smem()


def _store(value: Any, slot: Any, scratch: Scratch, problem: Problem) -> None:
    """Put a tile's sums into the output buffer, gated where asked for."""
    value = plgpu.layout_cast(value, plgpu.Layout.WGMMA_TRANSPOSED)
    scratch.sums.T[...] = value
    plgpu.commit_smem()
    out = scratch.out.at[slot]
    if problem.gated:
        half = TILE // 2
        layout = row_layout(problem.padded, half)
        gate = load(scratch.sums.at[:, pl.ds(0, half)], layout)
        up = load(scratch.sums.at[:, pl.ds(half, half)], layout)
        out[...] = (gate / (1 + jnp.exp(-gate)) * up).astype(problem.dtype)
    else:
        layout = row_layout(problem.padded, TILE)
        out[...] = load(scratch.sums, layout).astype(problem.dtype)
    plgpu.commit_smem()


def _multiply_tiles(cell: Any, operands: Any, scratch: Scratch, problem: Problem) -> None:
    """Stream this cell's tiles of the weight as one sequence of steps."""
    x, norm, weight, y = operands
    stages, steps, depth = problem.config.stages, problem.steps, problem.config.depth
    count = lax.div(problem.tiles - cell + problem.cells - 1, problem.cells)
    rows = pl.ds(lax.rem(cell, jnp.int32(1)), problem.padded)  # may reach past the last row
    part = TILE // 2 if problem.gated else TILE

    def fetch(i: Any) -> None:
        tile, stage = cell + lax.div(i, steps) * problem.cells, lax.rem(i, stages)
        place = pl.ds(lax.rem(i, steps) * depth, depth)
        for first in range(0, TILE, part):
            begin = tile * part + (problem.out // 2 if first else 0)
            target = scratch.weights.at[stage, pl.ds(first, part)]
            ready = scratch.weights_ready.at[stage]
            plgpu.copy_gmem_to_smem(weight.at[pl.ds(begin, part), place], target, ready)

    # The rows first: behind the weight's tiles they would wait for all of those.
    plgpu.copy_gmem_to_smem(norm, scratch.norm, scratch.rows_ready)
    for step in range(steps):
        source = x.at[rows, pl.ds(step * depth, depth)]
        plgpu.copy_gmem_to_smem(source, scratch.rows.at[step], scratch.rows_ready)
    for i in range(stages):
        pl.when(i < count * steps)(partial(fetch, jnp.int32(i)))
    plgpu.barrier_wait(scratch.rows_ready)
    _normalize(scratch, problem)

    @pl.loop(0, count)
    def do_tile(i: Any) -> None:
        def multiply(acc: Any) -> Any:
            @pl.loop(0, steps)
            def do_step(step: Any) -> None:
                done = i * steps + step
                stage = lax.rem(done, stages)
                plgpu.barrier_wait(scratch.weights_ready.at[stage])
                plgpu.wgmma(acc, scratch.weights.at[stage], scratch.rows.at[step].T)
                plgpu.wgmma_wait(1)  # the tile of the step before is free now
                ahead = done - 1 + stages
                free = jnp.logical_and(done >= 1, ahead < count * steps)
                pl.when(free)(lambda: fetch(ahead))

            return acc[...]

        value = pl.run_scoped(multiply, plgpu.ACC((TILE, problem.padded), jnp.float32))
        slot = lax.rem(i, 2)
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
        _store(value, slot, scratch, problem)
        columns = pl.ds((cell + i * problem.cells) * problem.columns, problem.columns)
        plgpu.copy_smem_to_gmem(scratch.out.at[slot], y.at[rows, columns])

    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def multiply_rows(problem: Problem) -> Callable[..., Any]:
    """Return the kernel: (x [M, D], norm, weight) -> y."""

    def fused_matmul(*refs: Any) -> None:
        _multiply_tiles(lax.axis_index("cell"), refs[:4], Scratch(*refs[4:]), problem)

    wide = problem.out // 2 if problem.gated else problem.out
    return launch(
        fused_matmul,
        name="fused_matmul",
        grid={"cell": problem.cells},
        out_type=jax.ShapeDtypeStruct((problem.rows, wide), problem.dtype),
        scratch_types=_scratch_types(problem),
    )
