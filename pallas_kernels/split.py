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
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic import LANES, WARPS, launch, load, row_layout

UNROLL = 16  # batch rows whose lengths are loaded together: more would take too many registers
JOIN_LOADS = 16  # numbers of runs that a lane loads before it uses the first
MAX_BATCH = 128  # rows: one for each thread of a warpgroup
ONE = 1 << 16  # of a fixed-point rate
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
    Long runs come first, so that short ones fill what they leave. Each thread ranks one batch
    row against all others; integers throughout, or two threads might rank differently.
    """
    layout = plgpu.Layout.WG_STRIDED((MAX_BATCH,), 1)
    own = plgpu.broadcasted_iota(jnp.int32, (MAX_BATCH,), 0, layout=layout)

    def tiles_of(b: Any) -> Any:
        return _tile_range(starts[b], rows, config.block, window)[1]

    def add(b: Any, carry: Any) -> Any:
        total, tiles = carry
        count = tiles_of(b)
        return total + count, jnp.where(own == b, count, tiles)

    empty = plgpu.layout_cast(jnp.zeros((MAX_BATCH,), jnp.int32), layout)
    total, tiles = _over_batch(batch, add, (jnp.int32(0), empty))
    rate = lax.div(jnp.int32(config.slots * ONE), total * kv_heads)
    rate = jnp.minimum(rate, ONE // config.least)

    def runs_of(tiles: Any) -> Any:
        return jnp.maximum(lax.shift_right_logical(tiles * rate + ONE // 2, jnp.int32(16)), 1)

    runs = runs_of(tiles)

    def rank(b: Any, before: Any) -> Any:
        count = tiles_of(b)
        other = runs_of(count)
        longer, same = count * runs > tiles * other, count * runs == tiles * other
        first = jnp.logical_or(longer, jnp.logical_and(same, own > b))
        return before + jnp.where(first, other * kv_heads, 0)

    before = _over_batch(batch, rank, empty)
    mine = jnp.logical_and(item >= before, item < before + runs * kv_heads)
    mine = jnp.logical_and(mine, own < batch)
    found = jnp.where(mine, before * MAX_BATCH + own, -1).max()
    owner = jnp.maximum(found, 0)
    b, base = lax.rem(owner, MAX_BATCH), lax.div(owner, MAX_BATCH)
    first, count = _tile_range(starts[b], rows, config.block, window)
    split = runs_of(count)
    run, head = lax.div(item - base, kv_heads), lax.rem(item - base, kv_heads)
    begin, end = lax.div(count * run, split), lax.div(count * (run + 1), split)
    return Item(
        valid=found >= 0,
        batch=b,
        start=starts[b],
        head=head,
        first=first + begin,
        stride=1,
        count=end - begin,
        runs=split,
        slot=base + head * split + run,
        base=base,
        leads=item == base,
    )


def join_runs(
    shape: tuple[int, ...], dtype: Any, kv_heads: int, padded: int, runs: int | None
) -> Callable[..., None]:
    """Return the kernel that joins the runs of the batch rows that have more than one.

    Operands: the plan [B, 2] (first slot and runs of a batch row; unread when `runs` is given),
    the partial results [items, tiles, R, H] and their logarithmic sums to base 2
    [items, tiles, R], and a reference to the output [B, T, N, H], of which the other batch rows
    keep their values. `padded` rows of R belong to one query head; a cell does rows of one.
    """
    batch, count, heads, width = shape
    group = heads // kv_heads
    rows = math.gcd(count, WARPS if runs else 2 * WARPS)
    layout = row_layout(rows, width)
    square = (rows, width) if rows > 1 else (width,)
    unroll = max(1, JOIN_LOADS * WARPS * LANES // (width * max(rows, WARPS)))
    if runs is not None:
        unroll = min(4 * unroll, runs)

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
        head = lax.axis_index("heads")
        key_head, member = lax.div(head, group), lax.rem(head, group)
        per_tile = parts.shape[2] // padded
        row = lax.rem(member, per_tile) * padded + first
        at = (lax.div(member, per_tile), row if rows == 1 else pl.ds(row, rows))

        def join_head(base: Any, runs: Any) -> None:
            value = joined(base + key_head * runs, runs, parts, sums, at)
            out[b, first if rows == 1 else pl.ds(first, rows), head] = value

        if runs is None:
            pl.when(plan[b, 1] > 1)(lambda: join_head(plan[b, 0], plan[b, 1]))
        else:
            join_head(0, runs)

    return launch(
        join,
        name="block_attention_join",
        grid={"batch": batch, "rows": count // rows, "heads": heads},
    )
