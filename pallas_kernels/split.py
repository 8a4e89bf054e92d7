"""How the key ranges of a ragged batch are divided over a fixed grid, and joined again.

The key range of a batch row is cut into tiles of `block` cache rows, and the tiles into runs. With
one batch row the number of runs is fixed. With several, runs have nearly one length for all of
them, so that a long row is spread over many cells and a short one is not. A run of one key head is
an item of work. The softmax of each run is partial: a second kernel joins the runs of a row by
their logarithmic sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic import WARPS, launch, load, row_layout

UNROLL = 16  # batch rows whose lengths are loaded together: more would take too many registers
JOIN_LOADS = 16  # runs that a warp loads before it uses the first
MANY_ROWS = 1024  # more of them than this are not worth a cell for each query head
NEGATIVE = -1e30  # below every score, and finite: the difference of two is not NaN


class Item(NamedTuple):
    """One item of work: `count` tiles of one batch row and key head, `stride` apart."""

    valid: Any  # whether there is such an item
    batch: Any
    start: Any  # cached rows before the block
    head: Any  # key head
    first: Any
    stride: int
    count: Any  # at least 1; a tile past the row's end adds nothing
    runs: Any  # of this batch row and key head; an int when it is fixed
    slot: Any  # where the item's partial result goes
    base: Any  # the slot of the batch row's first item
    leads: Any  # whether it is the batch row's first item


def fixed_runs(slots: int, batch: int, kv_heads: int) -> int | None:
    """Return the number of runs of a key head when lengths do not decide it."""
    return max(1, slots // kv_heads) if batch == 1 else None


def most_items(slots: int, batch: int, kv_heads: int) -> int:
    """Return a bound on the items."""
    runs = fixed_runs(slots, batch, kv_heads)
    return slots + batch * kv_heads if runs is None else runs * kv_heads


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
    """Find item number `item`, from the lengths alone."""
    runs = fixed_runs(config.slots, batch, kv_heads)
    if runs is None:
        return _locate_ragged(starts, item, batch, rows, kv_heads, window, config)
    first, tiles = _tile_range(starts[0], rows, config.block, window)
    run, head = lax.div(item, kv_heads), lax.rem(item, kv_heads)
    return Item(
        valid=True,
        batch=jnp.int32(0),
        start=starts[0],
        head=head,
        first=first + run,  # without a window it does not wait for the length
        stride=runs,
        count=jnp.maximum(lax.div(tiles - run + runs - 1, runs), 1),
        runs=runs,
        slot=head * runs + run,
        base=0,
        leads=item == 0,
    )


def _locate_ragged(
    starts: Any, item: Any, batch: int, rows: int, kv_heads: int, window: int, config: Any
) -> Item:
    """Find an item of a batch of several rows.

    A row's number of runs is its tiles over the mean tiles that a slot would get, rounded: at
    most `slots + batch * kv_heads` items, and a run is at most half as long again as the mean.
    Rows with less than half the mean come last, to fill what the others leave.
    """

    def add(b: Any, total: Any) -> Any:
        return total + _tile_range(starts[b], rows, config.block, window)[1]

    total = _over_batch(batch, add, jnp.int32(0)) * kv_heads
    rate = jnp.minimum(config.slots / total.astype(jnp.float32), 1.0 / config.least)

    def runs_of(start: Any) -> tuple[Any, Any, Any]:
        first, tiles = _tile_range(start, rows, config.block, window)
        return first, tiles, (tiles.astype(jnp.float32) * rate + 0.5).astype(jnp.int32)

    def find(b: Any, carry: Any, *, short: bool) -> Any:
        used, row, base = carry
        here = item >= used  # the last such row of those that have items
        row, base = jnp.where(here, b, row), jnp.where(here, used, base)
        runs = runs_of(starts[b])[2]
        if short:
            return used + jnp.where(runs == 0, kv_heads, 0), row, base
        return used + runs * kv_heads, row, base

    carry = (jnp.int32(0),) * 3
    for short in (False, True):
        carry = _over_batch(batch, partial(find, short=short), carry)
    used, b, base = carry
    start = starts[b]
    first, tiles, runs = runs_of(start)
    runs = jnp.maximum(runs, 1)
    local = item - base
    run, head = lax.div(local, kv_heads), lax.rem(local, kv_heads)
    begin, end = lax.div(tiles * run, runs), lax.div(tiles * (run + 1), runs)
    return Item(
        valid=item < used,
        batch=b,
        start=start,
        head=head,
        first=first + begin,
        stride=1,
        count=end - begin,
        runs=runs,
        slot=base + head * runs + run,
        base=base,
        leads=local == 0,
    )


def join_runs(
    shape: tuple[int, ...], dtype: Any, kv_heads: int, padded: int, runs: int | None
) -> Callable[..., None]:
    """Return the kernel that joins the runs of the batch rows that have more than one.

    Operands: the plan [B, 2] (first slot and runs of a batch row; unread when `runs` is given),
    the partial results [items, tiles, R, H] and their logarithmic sums to base 2
    [items, tiles, R], and a reference to the output [B, T, N, H], of which the other batch rows
    keep their values. `padded` rows of R belong to one query head. A warp does one query row.
    """
    batch, count, heads, width = shape
    group = heads // kv_heads
    rows = math.gcd(count, WARPS)
    layout = row_layout(rows, width)
    square = (rows, width) if rows > 1 else (width,)
    members = group if batch * count * heads > MANY_ROWS * rows else 1  # of a cell
    unroll = min(JOIN_LOADS * 128 // max(width, 128), runs or JOIN_LOADS)

    def filled(value: float) -> Any:
        return plgpu.layout_cast(jnp.full(square, value, jnp.float32), layout)

    def joined(base: Any, runs: Any, parts: Any, sums: Any, at: Any) -> Any:
        def fetch(run: Any) -> tuple[Any, Any]:
            slot = base + jnp.minimum(run, runs - 1)
            ignored = jnp.where(run < runs, 0.0, NEGATIVE)
            if rows == 1:
                total = lax.broadcast_in_dim(sums[slot, *at] + ignored, square, [])
            else:
                total = load(sums.at[slot, *at], layout.reduce(1)) + ignored
                total = lax.broadcast_in_dim(total, square, [0])
            return total, load(parts.at[slot, *at], layout)

        def step(i: Any, carry: Any) -> Any:
            acc, top, weight = carry
            loads = [fetch(i * unroll + u) for u in range(unroll)]
            higher = top
            for total, _ in loads:
                higher = jnp.maximum(higher, total)
            kept = jnp.exp2(top - higher)
            acc, weight = acc * kept, weight * kept
            for total, part in loads:
                share = jnp.exp2(total - higher)
                acc, weight = acc + part * share, weight + share
            return acc, higher, weight

        carry = (filled(0.0), filled(NEGATIVE), filled(0.0))
        if isinstance(runs, int) and runs == unroll:
            acc, _, weight = step(0, carry)
        else:
            acc, _, weight = lax.fori_loop(0, lax.div(runs + unroll - 1, unroll), step, carry)
        return (acc / weight).astype(dtype)

    def join(plan: Any, parts: Any, sums: Any, out: Any) -> None:
        b, first = lax.axis_index("batch"), lax.axis_index("rows") * rows
        cell = lax.axis_index("heads") * members
        per_tile = parts.shape[2] // padded

        def join_heads(base: Any, runs: Any) -> None:
            def head(i: Any, _: Any) -> Any:
                key_head, member = lax.div(cell + i, group), lax.rem(cell + i, group)
                tile = lax.div(member, per_tile)
                row = lax.rem(member, per_tile) * padded + first
                at = (tile, row if rows == 1 else pl.ds(row, rows))
                value = joined(base + key_head * runs, runs, parts, sums, at)
                out[b, first if rows == 1 else pl.ds(first, rows), cell + i] = value
                return ()

            lax.fori_loop(0, members, head, ())

        if runs is None:
            pl.when(plan[b, 1] > 1)(lambda: join_heads(plan[b, 0], plan[b, 1]))
        else:
            join_heads(0, runs)

    return launch(
        join,
        name="block_attention_join",
        grid={"batch": batch, "rows": count // rows, "heads": heads // members},
    )
