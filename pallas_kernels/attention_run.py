"""The kernel of `block_attention`: one warpgroup attends to one run of cache rows of one key head.

The padded rows of several query heads share a wgmma tile of 64 rows. Tiles of the cache stream
through shared memory by TMA, `stages` of them in flight.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic import matrix_tiles
from pallas_kernels.split import NEGATIVE, Item, most_items

TILE = 64  # query rows of a wgmma
LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class Problem:
    """Static geometry of a launch.

    A tile holds the padded rows of `members` query heads of one key head. Wide heads are shared
    between cells, each of which computes some columns of the output.
    """

    shape: tuple[int, ...]  # of the queries
    rows: int  # the queries' own; their array may be padded to 16
    kv_heads: int
    dtype: Any
    causal: bool
    window: int
    config: Any

    @property
    def group(self) -> int:
        return self.shape[2] // self.kv_heads

    @property
    def padded(self) -> int:
        return 8 if self.rows <= 8 else 16

    @property
    def members(self) -> int:
        return min(self.group, TILE // self.padded)

    @property
    def tiles(self) -> int:
        return -(-self.group // self.members)

    @property
    def queries(self) -> int:
        """Query rows of a tile that are stored."""
        return self.members * self.padded

    @property
    def columns(self) -> int:
        """Columns of the output that a cell computes: more would take too many registers."""
        return min(self.shape[3], 128)

    @property
    def items(self) -> int:
        return most_items(self.config.slots, self.shape[0], self.kv_heads)


class Cell(NamedTuple):
    """A cell of the grid, besides its item."""

    tile: Any
    column: Any  # first of its columns of the output
    problem: Problem


def query_rows(item: Item, problem: Problem) -> Any:
    """Slice a tile's 8 or 16 rows, which may reach past T: such rows read zeros, write nothing.

    The start is zero, but not to the tracer, which would refuse the length.
    """
    return pl.ds(lax.rem(item.batch, jnp.int32(1)), problem.padded)


def _softmax_step(
    scores: Any, first: Any, item: Item, carry: tuple[Any, Any], problem: Problem
) -> tuple[Any, Any, Any, Any]:
    """Mask scores of the keys from `first` on and fold them into the running maximum and sum.

    Both are in base 2. Limits are relative to `first`, so that they cost one value a row.
    """
    top, total = carry
    row = plgpu.broadcasted_iota(jnp.int32, scores.shape, 0, layout=plgpu.Layout.WGMMA)
    column = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=plgpu.Layout.WGMMA)
    end = item.start + problem.rows - 1 - first
    position = jnp.bitwise_and(row, problem.padded - 1) + (item.start - first)
    visible = column <= (jnp.minimum(position, end) if problem.causal else end)
    if problem.window:
        visible = jnp.logical_and(visible, column > position - problem.window)
    scores = jnp.where(visible, scores * (problem.shape[3] ** -0.5 * LOG2_E), -jnp.inf)
    higher = jnp.maximum(top, scores.max(axis=1))
    kept = jnp.exp2(top - higher)
    weights = jnp.exp2(scores - lax.broadcast_in_dim(higher, scores.shape, [0]))
    return weights, kept, higher, total * kept + weights.sum(axis=1)


class Scratch(NamedTuple):
    """Shared memory of a cell. The output may take the place of the cache tiles."""

    q_tile: Any
    p_tile: Any
    tiles: Any  # union of (keys, values) and the float32 output
    sums: Any
    q_ready: Any
    k_ready: Any
    v_ready: Any


def scratch_types(problem: Problem) -> Scratch:
    """Return the shared memory that a cell needs."""
    block, stages = problem.config.block, problem.config.stages
    width, dtype = problem.shape[3], problem.dtype
    keys = plgpu.SMEM((stages, block, width), dtype, transforms=matrix_tiles())
    values = plgpu.SMEM((stages, block, problem.columns), dtype, transforms=matrix_tiles())
    output = plgpu.SMEM((TILE, problem.columns), jnp.float32, transforms=matrix_tiles(32))
    return Scratch(
        q_tile=plgpu.SMEM((TILE, width), dtype, transforms=matrix_tiles()),
        p_tile=plgpu.SMEM((TILE, block), dtype, transforms=matrix_tiles()),
        tiles=plgpu.RefUnion((keys, values), output),
        sums=plgpu.SMEM((TILE,), jnp.float32),
        q_ready=plgpu.Barrier(num_arrivals=problem.members),
        k_ready=plgpu.Barrier(num_arrivals=1, num_barriers=stages),
        v_ready=plgpu.Barrier(num_arrivals=1, num_barriers=stages),
    )


def _matmul(a: Any, b: Any) -> Any:
    def multiply(acc: Any) -> Any:
        plgpu.wgmma(acc, a, b)
        return acc[...]

    return pl.run_scoped(multiply, plgpu.ACC((TILE, b.shape[1]), jnp.float32))


def _filled(shape: tuple[int, ...], value: float, layout: Any) -> Any:
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def attend_run(
    item: Item, fetches: Any, scratch: Scratch, problem: Problem
) -> tuple[Any, Any, Any]:
    """Attend to a run's tiles, the first of them on their way; return output, maximum and sum.

    The output is not yet divided by the sum.
    """
    (k_tiles, v_tiles), _ = scratch.tiles
    block, stages = problem.config.block, problem.config.stages

    fetch_keys, fetch_values = fetches

    def step(i: Any, carry: Any) -> Any:
        out, top, total = carry
        stage = lax.rem(i, stages)
        more = i + stages < item.count
        plgpu.barrier_wait(scratch.k_ready.at[stage])
        scores = _matmul(scratch.q_tile, k_tiles.at[stage].T)
        pl.when(more)(lambda: fetch_keys(i + stages))
        first = (item.first + i * item.stride) * block
        weights, kept, top, total = _softmax_step(scores, first, item, (top, total), problem)
        weights = weights.astype(problem.dtype)
        if not problem.config.weights_in_registers:
            scratch.p_tile[...] = weights
            plgpu.commit_smem()
            weights = scratch.p_tile
        plgpu.barrier_wait(scratch.v_ready.at[stage])
        product = _matmul(weights, v_tiles.at[stage])
        out = out * lax.broadcast_in_dim(kept, out.shape, [0]) + product
        pl.when(more)(lambda: fetch_values(i + stages))
        return out, top, total

    rows = plgpu.Layout.WGMMA.reduce(1)
    out = _filled((TILE, problem.columns), 0.0, plgpu.Layout.WGMMA)
    carry = (out, _filled((TILE,), NEGATIVE, rows), _filled((TILE,), 0.0, rows))
    return lax.fori_loop(0, item.count, step, carry)
