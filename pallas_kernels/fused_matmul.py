"""A few rows through RMSNorm, a projection and a SiLU gate in one pass over the weight.

`y = rms_norm(x) @ weight.T`, accumulated in float32. With `gated`, the weight holds F gate rows
and then F up rows, and the result is `silu(y[:, :F]) * y[:, F:]`. RMSNorm computes in float32,
casts back, then scales, as everywhere else.

The kernel is for rows so few that the weight is what costs: each cell streams tiles of it, and
keeps the normed rows, which it makes while its first tiles are on their way.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.matmul_cells import TILE, Problem, multiply_rows
from pallas_kernels.platform import resolve_implementation
from pallas_kernels.projection import project
from pallas_kernels.rotary import normalize_heads
from pallas_kernels.tuning import tuned

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
