"""How the key ranges of a ragged batch are divided over a fixed grid, and joined again.

The key range of a batch row is cut into tiles of `block` cache rows, and the tiles into runs of
nearly one length for all batch rows, so that a long row is spread over many cells and a short one
is not. A run of one key head is an item of work. The softmax of each run is partial: a second
kernel joins the runs of a row by their logarithmic sums.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic import WARPS, launch, load, row_layout

UNROLL = 16  # batch rows whose lengths are loaded together: more would take too many registers
JOIN_LOADS = 4  # runs that a warp loads before it uses the first
NEGATIVE = -1e30  # below every score, and finite: the difference of two is not NaN


class Item(NamedTuple):
    """One item of work: tiles `first` .. `first + count - 1` of one batch row and key head."""

    valid: Any  # whether there is such an item
    batch: Any
    start: Any  # cached rows before the block
    head: Any  # key head
    first: Any
    count: Any
    runs: Any  # of this batch row and key head
    slot: Any  # where the item's partial result goes
    base: Any  # the slot of the batch row's first item
    leads: Any  # whether it is the batch row's first item


def padded_items(slots: int, batch: int, kv_heads: int) -> int:
    """Return a bound on the items, plus what a join may load past the last one."""
    return slots + batch * kv_heads + WARPS * JOIN_LOADS


def _tile_range(start: Any, rows: int, block: int, window: int) -> tuple[Any, Any]:
    first = jnp.int32(0)
    if window:
        first = lax.div(jnp.maximum(start + 1 - window, 0), block)
    return first, lax.div(start + rows + block - 1, block) - first


def _over_batch(batch: int, step: Callable[[Any, Any], Any], carry: Any) -> Any:
    """Fold `step(b, carry)` over the batch rows, `UNROLL` of them at a time."""
    groups = batch // UNROLL if batch > UNROLL else 0

    def group(i: Any, carry: Any) -> Any:
        for offset in range(UNROLL):
            carry = step(i * UNROLL + offset, carry)
        return carry

    if groups:
        carry = lax.fori_loop(0, groups, group, carry)
    for b in range(groups * UNROLL, batch):
        carry = step(jnp.int32(b), carry)
    return carry


def locate(
    starts: Any, item: Any, *, batch: int, rows: int, kv_heads: int, window: int, config: Any
) -> Item:
    """Find item number `item`, from the lengths alone.

    A row's number of runs is its tiles over the mean tiles a slot would get, rounded: at most
    `slots + batch * kv_heads` items, and a run is at most half as long again as the mean.
    """

    def add(b: Any, total: Any) -> Any:
        return total + _tile_range(starts[b], rows, config.block, window)[1]

    total = _over_batch(batch, add, jnp.int32(0)) * kv_heads
    rate = jnp.minimum(config.slots / total.astype(jnp.float32), 1.0 / config.least)

    def find(b: Any, carry: Any) -> Any:
        used, *found = carry
        start = starts[b]
        first, tiles = _tile_range(start, rows, config.block, window)
        wanted = jnp.maximum((tiles.astype(jnp.float32) * rate + 0.5).astype(jnp.int32), 1)
        each = lax.div(tiles + wanted - 1, wanted)
        runs = lax.div(tiles + each - 1, each)
        after = used + runs * kv_heads
        here = jnp.logical_and(item >= used, item < after)
        current = (b, start, first, tiles, each, runs, used)
        return after, *(jnp.where(here, c, f) for c, f in zip(current, found, strict=True))

    zero, one = jnp.int32(0), jnp.int32(1)
    carry = (zero, zero, zero, zero, one, one, one, zero)
    used, b, start, first, tiles, each, runs, base = _over_batch(batch, find, carry)
    local = item - base
    run, head = lax.div(local, kv_heads), lax.rem(local, kv_heads)
    return Item(
        valid=item < used,
        batch=b,
        start=start,
        head=head,
        first=first + run * each,
        count=jnp.minimum(each, tiles - run * each),
        runs=runs,
        slot=base + head * runs + run,
        base=base,
        leads=local == 0,
    )


def join_runs(shape: tuple[int, ...], dtype: Any, kv_heads: int, rows: int) -> Callable[..., None]:
    """Return the kernel that joins the runs of the batch rows that have more than one.

    Operands: the plan [B, 2] (first slot and runs of a batch row), the partial results
    [items, tiles, R, H] and their logarithmic sums to base 2 [items, tiles, 64], and a reference
    to the output [B, T, N, H], of which the other batch rows keep their values. A cell does one
    query row: its warps take runs in turn.
    """
    batch, count, heads, width = shape
    group = heads // kv_heads
    layout = row_layout(WARPS, width)
    square = (WARPS, width)

    def filled(value: float) -> Any:
        return plgpu.layout_cast(jnp.full(square, value, jnp.float32), layout)

    def join(plan: Any, parts: Any, sums: Any, out: Any) -> None:
        cell = lax.axis_index("row")
        b, t = lax.div(cell, count * heads), lax.rem(lax.div(cell, heads), count)
        n = lax.rem(cell, heads)
        head, member = lax.div(n, group), lax.rem(n, group)
        per_tile = parts.shape[2] // rows
        tile, row = lax.div(member, per_tile), lax.rem(member, per_tile) * rows + t
        runs = plan[b, 1]
        base = plan[b, 0] + head * runs
        warp = plgpu.broadcasted_iota(jnp.int32, square, 0, layout=layout)

        def fetch(first: Any) -> tuple[Any, Any]:
            at = pl.ds(base + first, WARPS)
            real = warp + first < runs
            total = load(sums.at[at, tile, row], layout.reduce(1))
            part = load(parts.at[at, tile, row], layout)
            total = jnp.where(real, lax.broadcast_in_dim(total, square, [0]), NEGATIVE)
            return total, jnp.where(real, part, 0.0)

        def step(i: Any, carry: Any) -> Any:
            acc, top, weight = carry
            loads = [fetch((i * JOIN_LOADS + u) * WARPS) for u in range(JOIN_LOADS)]
            higher = top
            for total, _ in loads:
                higher = jnp.maximum(higher, total)
            kept = jnp.exp2(top - higher)
            acc, weight = acc * kept, weight * kept
            for total, part in loads:
                share = jnp.exp2(total - higher)
                acc, weight = acc + part * share, weight + share
            return acc, higher, weight

        @pl.when(runs > 1)
        def join_row() -> None:
            steps = lax.div(runs + WARPS * JOIN_LOADS - 1, WARPS * JOIN_LOADS)
            carry = (filled(0.0), filled(NEGATIVE), filled(0.0))
            acc, top, weight = lax.fori_loop(0, steps, step, carry)
            share = jnp.exp2(top - lax.broadcast_in_dim(top.max(axis=0), square, [1]))
            value = (acc * share).sum(axis=0) / (weight * share).sum(axis=0)
            out[b, t, n] = value.astype(dtype)

    return launch(join, name="block_attention_join", grid={"row": batch * count * heads})
