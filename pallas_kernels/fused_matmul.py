"""A few rows through RMSNorm, a projection and a SiLU gate in one pass over the weight.

`y = rms_norm(x) @ weight.T`, accumulated in float32. With `gated`, the weight holds F gate rows
and then F up rows, and the result is `silu(y[:, :F]) * y[:, F:]`. RMSNorm computes in float32,
casts back, then scales, as everywhere else.

The kernel is for rows so few that the weight is what costs: each cell streams tiles of it, and
keeps the normed rows, which it makes while its first tiles are on their way.
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
from jaxtyping import Array, Float

from pallas_kernels.mosaic import launch, load, matrix_tiles, row_layout
from pallas_kernels.platform import resolve_implementation
from pallas_kernels.rotary import normalize_heads
from pallas_kernels.tuning import tuned

TILE = 64  # weight rows of a wgmma
MAX_ROWS = 16
SHARED_BYTES = 230_000  # of a cell, for rows and tiles


@dataclass(frozen=True)
class Config:
    """Sizes of the kernel."""

    cells: int = 132
    depth: int = 256  # columns of a weight tile
    stages: int = 4  # tiles in flight

    def __post_init__(self) -> None:
        if self.depth not in (64, 128, 256):
            raise ValueError(f"depth must be 64, 128 or 256, got {self.depth}")
        if self.cells < 1 or self.stages < 2:
            raise ValueError(f"cells must be positive and stages at least 2, got {self}")


@dataclass(frozen=True)
class Spec:
    """A shape that is served: tests, benches and tuning read these."""

    rows: int
    width: int = 4096
    out: int = 24576
    gated: bool = True


SPECS = (
    *(Spec(rows) for rows in (1, 7, 8, 16)),
    *(Spec(rows, out=6144, gated=False) for rows in (1, 7, 8)),
    *(Spec(8, width, out) for width, out in ((1024, 6144), (2560, 19456), (5120, 34816))),
)


def matmul_precision(dtype: Any) -> lax.Precision:
    """float32 means highest precision on every platform (a GPU or TPU would round otherwise)."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT


def project(
    x: Float[Array, "*rows d"], weight: Float[Array, "n d"], out_dtype: Any = None
) -> Float[Array, "*rows n"]:
    """x @ weight.T, accumulated in float32 and returned in `out_dtype` (x's when None)."""
    dot = partial(
        jnp.einsum,
        precision=matmul_precision(x.dtype),
        preferred_element_type=out_dtype or x.dtype,
    )

    def weight_first(x: Array, weight: Array) -> Array:
        return jnp.moveaxis(dot("nd,...d->n...", weight, x), 0, -1)

    def rows_first(x: Array, weight: Array) -> Array:
        return dot("...d,nd->...n", x, weight)

    # The same sums in the same order. On a CPU a few rows against a [out, in] weight run twice
    # as fast with the weight on the left.
    return lax.platform_dependent(x, weight, cpu=weight_first, default=rows_first)


def fused_matmul_reference(
    x: Float[Array, "*rows d"],
    norm: Float[Array, " d"],
    weight: Float[Array, "n d"],
    *,
    gated: bool,
    eps: float = 1e-6,
) -> Float[Array, "*rows m"]:
    """Compute the op in jax.numpy, for any number of rows."""
    y = project(normalize_heads(x, norm, eps), weight)
    if not gated:
        return y
    gate, up = jnp.split(y, 2, axis=-1)
    return jax.nn.silu(gate) * up


@dataclass(frozen=True)
class Problem:
    """Static geometry of the kernel."""

    rows: int
    width: int
    out: int  # weight rows
    gated: bool
    eps: float
    dtype: Any
    config: Config

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


def shape_name(rows: int, width: int, out: int, gated: bool) -> str:
    """Name what sizes are tuned for."""
    return f"rows {rows} {width} to {out}{' gated' if gated else ''}"


def most_stages(rows: int, width: int, depth: int) -> int:
    """Return the tiles in flight that shared memory holds beside the rows; 0 or 1 is too few."""
    padded = -(-rows // 8) * 8
    room = SHARED_BYTES - 2 * width - padded * (2 * width + 4 * TILE + 2 * 2 * TILE)
    return max(0, min(12, room // (2 * TILE * depth)))


def choose_config(rows: int, width: int, out: int, gated: bool) -> Config:
    """Return the tuned sizes, or sizes that suit most shapes."""
    if (fields := tuned("fused_matmul", shape_name(rows, width, out, gated))) is not None:
        return Config(**fields)
    depths = [depth for depth in (256, 128, 64) if width % depth == 0]
    depth = next((d for d in depths if most_stages(rows, width, d) >= 3), depths[-1])
    return Config(depth=depth, stages=most_stages(rows, width, depth))


def kernel_objection(
    x: Float[Array, "*rows d"], weight: Float[Array, "n d"], gated: bool
) -> str | None:
    """Say why the kernel does not take these operands, or return None."""
    rows, (out, width) = x.size // x.shape[-1], weight.shape
    if x.dtype != jnp.bfloat16 or weight.dtype != jnp.bfloat16:
        return f"the matmul kernel takes bfloat16, got {x.dtype} and {weight.dtype}"
    if rows > MAX_ROWS:
        return f"the matmul kernel takes up to {MAX_ROWS} rows, got {rows}"
    if width % 64 or out % TILE or (gated and out % (2 * TILE)):
        return f"the matmul kernel takes sizes of 64 n (gated: 128 n), got {width} to {out}"
    if most_stages(rows, width, 64) < 2:
        return f"the matmul kernel holds its rows in shared memory, {rows} of {width} do not fit"
    return None


@partial(jax.jit, static_argnames=("gated", "eps", "config"))
def fused_matmul_kernel(
    x: Float[Array, "*rows d"],
    norm: Float[Array, " d"],
    weight: Float[Array, "n d"],
    *,
    gated: bool,
    eps: float,
    config: Config,
) -> Float[Array, "*rows m"]:
    """Compute the op with one kernel."""
    flat = x.reshape(-1, x.shape[-1])
    real, width = flat.shape
    count = real if real <= 8 else -(-real // 8) * 8  # what a copy of whole tiles takes
    flat = jnp.pad(flat, ((0, count - real), (0, 0)))
    problem = Problem(count, width, weight.shape[0], gated, eps, x.dtype, config)
    y = multiply_rows(problem)(flat, norm.reshape(problem.steps, -1), weight)
    return y[:real].reshape(*x.shape[:-1], -1)


def fused_matmul(
    x: Float[Array, "*rows d"],
    norm: Float[Array, " d"],
    weight: Float[Array, "n d"],
    *,
    gated: bool = False,
    eps: float = 1e-6,
    implementation: str = "auto",
    config: Config | None = None,
) -> Float[Array, "*rows m"]:
    """Return `rms_norm(x) @ weight.T`, gated where asked for; see the module.

    Args:
        x: rows, not yet normed.
        norm: weight of the RMSNorm.
        weight: [out, in]; with `gated`, all gate rows before all up rows.
        gated: whether the result is `silu(gate) * up`, half as wide.
        eps: of the RMSNorm.
        implementation: "auto", "pallas" or "xla". The kernel takes bfloat16, up to 16 rows in
            all, and sizes of 64 n; for other operands "auto" takes the reference.
        config: sizes of the kernel; by default the tuned ones.

    Raises:
        ValueError: the shapes do not fit, or "pallas" is named and cannot run these operands or
            on this device.
    """
    if weight.shape[1] != x.shape[-1] or norm.shape != x.shape[-1:]:
        raise ValueError(f"rows {x.shape}, norm {norm.shape} and weight {weight.shape} do not fit")
    if gated and weight.shape[0] % 2:
        raise ValueError(f"a gated weight has an even number of rows, got {weight.shape[0]}")
    objection = kernel_objection(x, weight, gated)
    if resolve_implementation(implementation, unsupported=objection) == "xla":
        return fused_matmul_reference(x, norm, weight, gated=gated, eps=eps)
    rows = x.size // x.shape[-1]
    config = config or choose_config(rows, weight.shape[1], weight.shape[0], gated)
    return fused_matmul_kernel(x, norm, weight, gated=gated, eps=eps, config=config)
