"""The kernel of `block_attention`: which run a cell does, how operands come and results go."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention_run import (
    TILE,
    Cell,
    Problem,
    Scratch,
    attend_run,
    query_rows,
    scratch_types,
)
from pallas_kernels.mosaic import launch
from pallas_kernels.split import NEGATIVE, Item, locate


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
            target = out.at[item.batch, query_rows(item, problem), head, columns]
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
        source = q.at[item.batch, query_rows(item, problem), head]
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
    value, top, total = attend_run(item, (fetch_keys, fetch_values), scratch, problem)
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
