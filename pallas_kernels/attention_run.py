"""The kernel of `block_attention`: one warpgroup attends to one run of cache rows of one key head.

The padded rows of several query heads share a wgmma tile of 64 rows. Tiles of the cache stream
through shared memory by TMA, `stages` of them in flight.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic import launch, matrix_tiles
from pallas_kernels.split import NEGATIVE, Item, locate, most_items

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


def _query_rows(item: Item, problem: Problem) -> Any:
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


def _attend_run(
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


def _store_whole(value: Any, item: Item, cell: Cell, out: Any, q_tile: Any) -> None:
    """Store the output of a row that has one run. The queries' tile is free by now."""
    problem = cell.problem
    columns = pl.ds(cell.column, problem.columns)
    q_tile[:, : problem.columns] = value.astype(problem.dtype)
    plgpu.commit_smem()
    for i in range(problem.members):
        member = cell.tile * problem.members + i

        @pl.when(member < problem.group)
        def store_head(i: int = i, member: Any = member) -> None:
            head = item.head * problem.group + member
            source = q_tile.at[pl.ds(i * problem.padded, problem.padded), pl.ds(0, problem.columns)]
            target = out.at[item.batch, _query_rows(item, problem), head, columns]
            plgpu.copy_smem_to_gmem(source, target)

    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _store_part(
    value: Any, logs: Any, item: Item, cell: Cell, parts: Any, sums: Any, scratch: Scratch
) -> None:
    """Store one run's output and logarithmic sums for the join."""
    problem = cell.problem
    _, output = scratch.tiles
    output[...] = value
    scratch.sums[...] = logs
    plgpu.commit_smem()
    target = parts.at[item.slot, cell.tile, :, pl.ds(cell.column, problem.columns)]
    plgpu.copy_smem_to_gmem(output.at[pl.ds(0, problem.queries)], target)

    @pl.when(cell.column == 0)
    def store_sums() -> None:
        plgpu.copy_smem_to_gmem(scratch.sums, sums.at[item.slot, cell.tile])

    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _load_queries(q: Any, item: Item, cell: Cell, scratch: Scratch) -> None:
    """Start copying a tile's query heads; a tile past the last one repeats it."""
    problem = cell.problem
    for i in range(problem.members):
        member = jnp.minimum(cell.tile * problem.members + i, problem.group - 1)
        head = item.head * problem.group + member
        target = scratch.q_tile.at[pl.ds(i * problem.padded, problem.padded)]
        source = q.at[item.batch, _query_rows(item, problem), head]
        plgpu.copy_gmem_to_smem(source, target, scratch.q_ready)


def _work(item: Item, cell: Cell, operands: Any, results: Any, scratch: Scratch) -> None:
    """Do one item: read the queries and the run's tiles, attend, store."""
    q, k_cache, v_cache = operands
    out, parts, sums, plan = results
    (k_tiles, v_tiles), _ = scratch.tiles
    problem = cell.problem
    block, stages = problem.config.block, problem.config.stages

    last = -(-k_cache.shape[1] // block) - 1

    def fetch(cache: Any, columns: Any, tiles: Any, ready: Any, i: Any) -> None:
        stage, tile = lax.rem(i, stages), jnp.minimum(item.first + i * item.stride, last)
        source = cache.at[item.batch, pl.ds(tile * block, block), item.head, columns]
        plgpu.copy_gmem_to_smem(source, tiles.at[stage], ready.at[stage])

    width, part = problem.shape[3], pl.ds(cell.column, problem.columns)
    fetch_keys = partial(fetch, k_cache, pl.ds(0, width), k_tiles, scratch.k_ready)
    fetch_values = partial(fetch, v_cache, part, v_tiles, scratch.v_ready)

    def fetch_both(i: Any) -> None:
        fetch_keys(i)
        fetch_values(i)

    fetch_both(jnp.int32(0))
    _load_queries(q, item, cell, scratch)
    for i in range(1, stages):
        pl.when(i < item.count)(partial(fetch_both, jnp.int32(i)))

    if not isinstance(item.runs, int):

        @pl.when(jnp.logical_and(item.leads, jnp.logical_and(cell.tile == 0, cell.column == 0)))
        def write_plan() -> None:
            plan[item.batch, 0] = item.base
            plan[item.batch, 1] = item.runs

    plgpu.barrier_wait(scratch.q_ready)
    value, top, total = _attend_run(item, (fetch_keys, fetch_values), scratch, problem)
    total = jnp.maximum(total, -1 / NEGATIVE)  # a row may see nothing in this run
    value = value * lax.broadcast_in_dim(1 / total, value.shape, [0])

    def store_whole() -> None:
        _store_whole(value, item, cell, out, scratch.q_tile)

    def store_part() -> None:
        _store_part(value, top + jnp.log2(total), item, cell, parts, sums, scratch)

    if isinstance(item.runs, int):
        (store_whole if item.runs == 1 else store_part)()
    else:
        pl.when(item.runs == 1)(store_whole)
        pl.when(item.runs > 1)(store_part)


def attend_runs(problem: Problem) -> Callable[..., Any]:
    """Return the kernel: (starts, q, k_cache, v_cache) -> (out, parts, sums, plan).

    `out` holds the batch rows that have one run; the others are for `split.join_runs`.
    """
    batch, _, _, width = problem.shape

    def attend(starts: Any, q: Any, k_cache: Any, v_cache: Any, *rest: Any) -> None:
        results, scratch = rest[:4], Scratch(*rest[4:])
        item = locate(
            starts,
            lax.axis_index("item"),
            batch=batch,
            rows=problem.rows,
            kv_heads=problem.kv_heads,
            window=problem.window,
            config=problem.config,
        )
        column = lax.axis_index("share") * problem.columns
        cell = Cell(lax.axis_index("tile"), column, problem)

        def work() -> None:
            _work(item, cell, (q, k_cache, v_cache), results, scratch)

        if item.valid is True:
            work()
        else:
            pl.when(item.valid)(work)

    return launch(
        attend,
        name="block_attention",
        grid={"share": width // problem.columns, "tile": problem.tiles, "item": problem.items},
        out_type=(
            jax.ShapeDtypeStruct(problem.shape, problem.dtype),
            jax.ShapeDtypeStruct(
                (problem.items, problem.tiles, problem.queries, width), jnp.float32
            ),
            jax.ShapeDtypeStruct((problem.items, problem.tiles, TILE), jnp.float32),
            jax.ShapeDtypeStruct((batch, 2), jnp.int32),
        ),
        scratch_types=scratch_types(problem),
    )
