"""The kernel of `markov_walk`: one slot's scores against a streamed w2, and each cell's best token.

A wgmma has 64 vocabulary rows as its rows and the padded batch as its columns. A cell first starts
to fetch its tiles of w2 and then looks for the token of the slot before, which w2 does not need.
"""

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

from pallas_kernels.mosaic import launch, load, matrix_tiles

TILE = 64  # vocabulary rows of a wgmma
NEGATIVE = -3e38  # below every score
FAR = 2.0**24  # above every token id, each of which float32 holds exactly


class _Best(NamedTuple):
    """The largest score so far, and the lowest token id that has it, as float32."""

    score: Any
    token: Any


def _across(best: _Best) -> _Best:
    """Reduce over the rows: the largest score of each batch row and its lowest token id."""
    top = best.score.max(axis=0)
    same = best.score == lax.broadcast_in_dim(top, best.score.shape, [1])
    return _Best(top, -jnp.where(same, -best.token, -FAR).max(axis=0))


@dataclass(frozen=True)
class Step:
    """Static geometry of the kernel of one slot."""

    shape: tuple[int, ...]  # of the logits
    rank: int
    dtype: Any
    slot: int
    noisy: bool
    config: Any

    @property
    def columns(self) -> int:
        """Batch rows, padded for wgmma."""
        return -(-self.shape[0] // 8) * 8

    @property
    def tiles(self) -> int:
        return -(-self.shape[2] // TILE)

    @property
    def cells(self) -> int:
        return min(self.config.cells, self.tiles)

    @property
    def padded(self) -> int:
        """Cells, padded for a register layout of whole tiles."""
        return -(-self.cells // TILE) * TILE


class Operands(NamedTuple):
    """Device memory of a step."""

    tokens: Any  # in place
    logits: Any  # in place: base logits before a slot's step, corrected ones after
    w1: Any
    w2: Any
    noise: Any
    scale: Any
    before: tuple[Any, ...]  # the cells' best of the slot before, or the anchor


class Scratch(NamedTuple):
    """Shared memory of a cell."""

    weights: Any
    base: Any
    noise: Any
    out: Any
    row: Any  # w1's rows of the previous tokens
    names: Any  # the previous tokens
    weights_ready: Any
    base_ready: Any


def _scratch_types(step: Step) -> Scratch:
    stages, columns = step.config.stages, step.columns
    wide = plgpu.SMEM((stages, columns, TILE), jnp.float32, transforms=matrix_tiles(32))
    return Scratch(
        weights=plgpu.SMEM((stages, TILE, step.rank), step.dtype, transforms=matrix_tiles()),
        base=wide,
        noise=wide if step.noisy else plgpu.SMEM((8,), jnp.float32),
        out=plgpu.SMEM((2, columns, TILE), jnp.float32, transforms=matrix_tiles(32)),
        row=plgpu.SMEM((columns, step.rank), step.dtype, transforms=matrix_tiles()),
        names=plgpu.SMEM((columns,), jnp.int32),
        weights_ready=plgpu.Barrier(num_arrivals=1, num_barriers=stages),
        base_ready=plgpu.Barrier(num_arrivals=2 if step.noisy else 1, num_barriers=stages),
    )


def _previous(operands: Operands, scratch: Scratch, step: Step, cell: Any) -> Any:
    """Return a reference to the tokens of the slot before; one cell also publishes them."""
    if not step.slot:
        return operands.before[0]
    layout = plgpu.Layout.WGMMA
    best = _Best(*(load(ref, layout) for ref in operands.before))
    scratch.names[...] = _across(best).token.astype(jnp.int32)
    plgpu.commit_smem()

    @pl.when(cell == 0)
    def publish() -> None:
        for b in range(step.shape[0]):
            operands.tokens[b, step.slot - 1] = scratch.names[b]

    return scratch.names


def _gather(previous: Any, operands: Operands, scratch: Scratch, step: Step) -> None:
    """Put the previous tokens' rows of w1 into shared memory, as a wgmma operand."""
    layout, shape = plgpu.Layout.WGMMA, (step.rank, step.columns)
    column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=layout)
    value = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout)
    for b in range(step.shape[0]):
        row = load(operands.w1.at[previous[b]], layout.reduce(1)).astype(jnp.float32)
        value = jnp.where(column == b, lax.broadcast_in_dim(row, shape, [0]), value)
    value = plgpu.layout_cast(value.astype(step.dtype), plgpu.Layout.WGMMA_TRANSPOSED)
    scratch.row.T[...] = value
    plgpu.commit_smem()


def _score_tile(
    tile: Any, stage: Any, best: _Best, constants: Any, scratch: Scratch, step: Step
) -> tuple[Any, _Best]:
    """Correct a tile's logits; return them and the best so far, element by element."""
    layout, shape = plgpu.Layout.WGMMA_TRANSPOSED, (TILE, step.columns)
    row, scale = constants

    def multiply(acc: Any) -> Any:
        plgpu.wgmma(acc, scratch.weights.at[stage], scratch.row.T)
        return acc[...]

    product = pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32))
    logits = plgpu.layout_cast(product, layout) + load(scratch.base.at[stage].T, layout)
    score = logits
    if step.noisy:
        spread = lax.broadcast_in_dim(scale, shape, [1])
        score = logits * spread + load(scratch.noise.at[stage].T, layout)
    token = row + (tile * TILE).astype(jnp.float32)
    score = jnp.where(token < step.shape[2], score, NEGATIVE)
    better = score > best.score
    score = jnp.where(better, score, best.score)
    return logits, _Best(score, jnp.where(better, token, best.token))


def _walk_tiles(cell: Any, operands: Operands, scratch: Scratch, step: Step) -> _Best:
    """Stream this cell's tiles of w2; what it needs of the slot before it finds meanwhile."""
    stages, cells = step.config.stages, step.cells
    count = lax.div(step.tiles - cell + cells - 1, cells)
    rows = pl.ds(lax.rem(cell, jnp.int32(1)), step.columns)  # may reach past the batch

    def fetch(i: Any) -> None:
        stage, place = lax.rem(i, stages), pl.ds((cell + i * cells) * TILE, TILE)
        ready = scratch.base_ready.at[stage]
        plgpu.copy_gmem_to_smem(
            operands.w2.at[place], scratch.weights.at[stage], scratch.weights_ready.at[stage]
        )
        source = operands.logits.at[rows, step.slot, place]
        plgpu.copy_gmem_to_smem(source, scratch.base.at[stage], ready)
        if step.noisy:
            source = operands.noise.at[rows, step.slot, place]
            plgpu.copy_gmem_to_smem(source, scratch.noise.at[stage], ready)

    for i in range(stages):
        pl.when(i < count)(partial(fetch, jnp.int32(i)))
    _gather(_previous(operands, scratch, step, cell), operands, scratch, step)
    layout, shape = plgpu.Layout.WGMMA_TRANSPOSED, (TILE, step.columns)
    # An iota made in a transposed layout gives two neighbouring rows the same number.
    row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA)
    row = plgpu.layout_cast(row.astype(jnp.float32), layout)
    scale = load(operands.scale, layout.reduce(0)) if step.noisy else None

    def body(i: Any, best: _Best) -> _Best:
        stage, tile = lax.rem(i, stages), cell + i * cells
        plgpu.barrier_wait(scratch.weights_ready.at[stage])
        plgpu.barrier_wait(scratch.base_ready.at[stage])
        logits, best = _score_tile(tile, stage, best, (row, scale), scratch, step)
        out = scratch.out.at[lax.rem(i, 2)]
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
        out.T[...] = logits
        plgpu.commit_smem()
        place = pl.ds(tile * TILE, TILE)
        plgpu.copy_smem_to_gmem(out, operands.logits.at[rows, step.slot, place])
        pl.when(i + stages < count)(lambda: fetch(i + stages))
        return best

    def filled(value: float) -> Any:
        return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

    best = lax.fori_loop(0, count, body, _Best(filled(NEGATIVE), filled(FAR)))
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    return best


def walk_step(step: Step) -> Callable[..., Any]:
    """Return the kernel of one slot: (tokens, logits, w1, w2, noise, scale, *before) -> best.

    `tokens` and `logits` are references. The best are scores and token ids [cells, N].
    """

    def walk(*refs: Any) -> None:
        inputs = 8 if step.slot else 7
        tokens_ref, logits, w1, w2, noise, scale = refs[:6]
        operands = Operands(tokens_ref, logits, w1, w2, noise, scale, refs[6:inputs])
        scores, tokens = refs[inputs : inputs + 2]
        scratch = Scratch(*refs[inputs + 2 :])
        cell = lax.axis_index("cell")
        best = _across(_walk_tiles(cell, operands, scratch, step))
        scores[cell], tokens[cell] = best.score, best.token

        layout = plgpu.Layout.WGMMA_TRANSPOSED.reduce(0)
        none = plgpu.layout_cast(jnp.full((step.columns,), NEGATIVE, jnp.float32), layout)
        for place in range(step.cells, step.padded, step.cells):

            @pl.when(cell + place < step.padded)
            def fill(place: int = place) -> None:
                scores[cell + place], tokens[cell + place] = none, none

    best = jax.ShapeDtypeStruct((step.padded, step.columns), jnp.float32)
    return launch(
        walk,
        name="markov_walk",
        grid={"cell": step.cells},
        out_type=(best, best),
        scratch_types=_scratch_types(step),
    )
