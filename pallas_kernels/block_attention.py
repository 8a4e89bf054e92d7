"""Attention of a block of new rows over a ragged cache, for verification, decoding and drafting.

The T rows of each batch row have already been written into the caches at rows `start` ..
`start + T - 1`; query t sits at position `start + t`. It sees key j if

- `j <= start + t` when causal, otherwise `j < start + T` (the block sees all of itself), and
- `j > start + t - window` when `window` is above 0.

Cache rows past those may hold any finite numbers and change nothing. Query heads `k * G` ..
`k * G + G - 1` read key head k, which is never repeated. Scores are scaled by `H ** -0.5`; the
softmax and every accumulation are float32; the result has the dtype of the queries.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.attention_cells import attend_runs
from pallas_kernels.attention_run import Problem
from pallas_kernels.chunk_attention import chunk_attention, cudnn_serves
from pallas_kernels.platform import resolve_implementation
from pallas_kernels.split import MAX_BATCH, fixed_runs, join_runs
from pallas_kernels.tuning import tuned

FIRST_TIER = 256
TIER_GROWTH = 4
MAX_SLOTS = 4096  # fixed-point rates of the kernel stay within 32 bits with
MAX_CACHE_ROWS = 1 << 20  # these two
MAX_ROWS = 16  # of the kernel; prompt chunks have more


@dataclass(frozen=True)
class Config:
    """Sizes of the kernel. `slots` is the number of equal runs that a batch is divided into."""

    block: int = 64  # cache rows a tile
    stages: int = 4  # tiles in flight; a power of two is cheaper
    slots: int = 128
    least: int = 1  # mean tiles of a run, at least
    weights_in_registers: bool = True  # False passes them through shared memory, for interpreters

    def __post_init__(self) -> None:
        if self.block not in (64, 128):
            raise ValueError(f"block must be 64 or 128, got {self.block}")
        if min(self.stages, self.slots, self.least) < 1 or self.slots > MAX_SLOTS:
            raise ValueError(f"sizes must be positive and slots at most {MAX_SLOTS}, got {self}")


@dataclass(frozen=True)
class Spec:
    """A shape that is served: tests, benches and tuning read these."""

    batch: int
    rows: int
    cached: int  # rows before the block
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    causal: bool = True
    window: int = 0


SPECS = (
    *(Spec(1, 8, cached) for cached in (256, 2048, 8192, 32768, 131072)),
    *(Spec(batch, 8, 2048) for batch in (2, 4, 8, 16, 32, 64)),
    *(Spec(batch, 8, 8192) for batch in (8, 32)),
    *(Spec(batch, 1, 2048) for batch in (1, 32)),
    *(Spec(batch, 7, 2048, causal=False) for batch in (1, 32)),
    *(Spec(1, rows, 2048) for rows in (3, 12, 16)),
    *(Spec(1, 8, 2048, heads=heads) for heads in (16, 40, 64)),
    Spec(1, 16, 2048, heads=64),
    Spec(1, 8, 512, heads=6, kv_heads=2, head_dim=64),
    Spec(1, 8, 2048, heads=8, kv_heads=4, head_dim=256),
    Spec(1, 8, 2048, heads=8, kv_heads=4, head_dim=256, window=512),
    Spec(1, 7, 8192, heads=64, head_dim=64, causal=False, window=128),
)


def length_tiers(cache_rows: int) -> tuple[int, ...]:
    """Return the static lengths that the reference reads: 256, 1024, ... and the whole cache."""
    tiers = []
    length = FIRST_TIER
    while length < cache_rows:
        tiers.append(length)
        length *= TIER_GROWTH
    return (*tiers, cache_rows)


def _attend(
    q: Float[Array, "B T N H"],
    k_cache: Float[Array, "B S K H"],
    v_cache: Float[Array, "B S K H"],
    start: Int[Array, " B"],
    *,
    length: int,
    causal: bool,
    window: int,
) -> Float[Array, "B T N H"]:
    """Attend to the first `length` cache rows."""
    batch, rows, _, width = q.shape
    k, v = k_cache[:, :length], v_cache[:, :length]
    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    dot = partial(jnp.einsum, precision=precision, preferred_element_type=jnp.float32)
    grouped = q.reshape(batch, rows, k.shape[2], -1, width)
    scores = dot("btkgh,bskh->bkgts", grouped, k) * width**-0.5

    position = start[:, None, None] + jnp.arange(rows)[None, :, None]
    key = jnp.arange(length)[None, None, :]
    visible = key <= position if causal else key < start[:, None, None] + rows
    if window > 0:
        visible &= key > position - window
    scores = jnp.where(visible[:, None, None], scores, -jnp.inf)

    weights = jnp.exp(scores - scores.max(axis=-1, keepdims=True))
    total = weights.sum(axis=-1)[..., None]
    out = dot("bkgts,bskh->bkgth", weights.astype(v.dtype), v) / total
    return out.transpose(0, 3, 1, 2, 4).reshape(q.shape).astype(q.dtype)


def block_attention_reference(
    q: Float[Array, "B T N H"],
    k_cache: Float[Array, "B S K H"],
    v_cache: Float[Array, "B S K H"],
    start: Int[Array, " B"],
    *,
    causal: bool,
    window: int = 0,
) -> Float[Array, "B T N H"]:
    """Compute the op in jax.numpy, for any T.

    Reads the smallest of a few static lengths that holds the longest row, so the cost follows
    what is cached and not what is allocated.
    """
    tiers = length_tiers(k_cache.shape[1])
    branches = [partial(_attend, length=n, causal=causal, window=window) for n in tiers]
    if len(tiers) == 1:
        return branches[0](q, k_cache, v_cache, start)
    needed = start.max() + q.shape[1]
    tier = sum((needed > n).astype(jnp.int32) for n in tiers[:-1])
    return lax.switch(tier, branches, q, k_cache, v_cache, start)


def shape_name(shape: tuple[int, ...], kv_heads: int) -> str:
    """Name what sizes are tuned for: the lengths of the rows are not known ahead."""
    batch, rows, heads, width = shape
    return f"batch {batch} rows {rows} heads {heads}/{kv_heads} width {width}"


def choose_config(shape: tuple[int, ...], kv_heads: int) -> Config:
    """Return the tuned sizes for queries of this shape, or sizes that suit most shapes."""
    batch, _, _, width = shape
    if (fields := tuned("block_attention", shape_name(shape, kv_heads))) is not None:
        return Config(**fields)
    if batch == 1:
        return Config(stages=4 if width <= 128 else 2)
    return Config(stages=2, slots=264 if batch * kv_heads > 128 else 128)


def kernel_objection(q: Float[Array, "B T N H"], k_cache: Float[Array, "B S K H"]) -> str | None:
    """Say why the kernel does not take these operands, or return None."""
    if q.dtype != jnp.bfloat16 or k_cache.dtype != jnp.bfloat16:
        return f"the attention kernel takes bfloat16, got {q.dtype} and {k_cache.dtype}"
    if q.shape[1] > MAX_ROWS:
        return f"the attention kernel takes up to {MAX_ROWS} rows, got {q.shape[1]}"
    if q.shape[3] not in (64, 128, 256):
        return f"the attention kernel takes heads of 64, 128 or 256, got {q.shape[3]}"
    if q.shape[0] > MAX_BATCH:
        return f"the attention kernel takes up to {MAX_BATCH} batch rows, got {q.shape[0]}"
    if k_cache.shape[1] % 8 or k_cache.shape[1] > MAX_CACHE_ROWS:
        return (
            f"the attention kernel takes a cache of 8 n rows up to {MAX_CACHE_ROWS}, got"
            f" {k_cache.shape[1]}"
        )
    return None


@partial(jax.jit, static_argnames=("causal", "window", "config"))
def block_attention_kernel(
    q: Float[Array, "B T N H"],
    k_cache: Float[Array, "B S K H"],
    v_cache: Float[Array, "B S K H"],
    start: Int[Array, " B"],
    *,
    causal: bool,
    window: int = 0,
    config: Config,
) -> Float[Array, "B T N H"]:
    """Compute the op with two kernels: attend to runs of the cache, then join the runs."""
    rows = q.shape[1]
    if 8 < rows < MAX_ROWS:
        q = jnp.pad(q, ((0, 0), (0, MAX_ROWS - rows), (0, 0), (0, 0)))
    problem = Problem(q.shape, rows, k_cache.shape[2], q.dtype, causal, window, config)
    out, parts, sums, plan = attend_runs(problem)(start, q, k_cache, v_cache)
    runs = fixed_runs(config.slots, q.shape[0], problem.kv_heads)
    if runs == 1:
        return out[:, :rows]
    joined = jax.new_ref(out)
    join = join_runs(problem.shape, problem.dtype, problem.kv_heads, problem.padded, runs)
    join(plan, parts, sums, joined)
    return jax.freeze(joined)[:, :rows]


def _is_chunk(q: Float[Array, "B T N H"], k_cache: Float[Array, "B S K H"], causal: bool) -> bool:
    """Whether cuDNN takes these operands: a chunk of a prompt, not a round's few rows."""
    few = q.shape[1] <= MAX_ROWS or not causal or q.dtype != k_cache.dtype
    return not few and cudnn_serves(q.dtype, q.shape[3])


def block_attention(
    q: Float[Array, "B T N H"],
    k_cache: Float[Array, "B S K H"],
    v_cache: Float[Array, "B S K H"],
    start: Int[Array, " B"],
    *,
    causal: bool,
    window: int = 0,
    implementation: str = "auto",
    config: Config | None = None,
) -> Float[Array, "B T N H"]:
    """Attend from T new rows to the cache they were written into; see the module.

    Args:
        q: queries at positions `start` .. `start + T - 1`, rotated.
        k_cache, v_cache: one layer's caches, the block's own rows included.
        start: cached rows before the block; `start + T <= S`.
        causal: whether a query sees only the block rows up to its own.
        window: rows a query sees, its own included; 0 is all.
        implementation: "auto", "pallas" or "xla". The kernel takes bfloat16, up to 16 rows,
            heads of 64, 128 or 256 and caches of 8 n rows; for other operands "auto" takes cuDNN
            where more rows are causal on a CUDA GPU, and else the reference.
        config: sizes of the kernel; by default the tuned ones.

    Raises:
        ValueError: the shapes do not fit, or "pallas" is named and cannot run these operands or
            on this device.
    """
    if q.shape[2] % k_cache.shape[2] or q.shape[3] != k_cache.shape[3]:
        raise ValueError(f"queries {q.shape} do not fit the key cache {k_cache.shape}")
    if q.shape[1] > k_cache.shape[1]:
        raise ValueError(f"{q.shape[1]} rows do not fit a cache of {k_cache.shape[1]} rows")
    objection = kernel_objection(q, k_cache)
    if resolve_implementation(implementation, unsupported=objection) == "xla":
        with jax.named_scope("block_attention"):
            if implementation == "auto" and _is_chunk(q, k_cache, causal):
                return chunk_attention(q, k_cache, v_cache, start, window=window)
            return block_attention_reference(
                q, k_cache, v_cache, start, causal=causal, window=window
            )
    config = config or choose_config(q.shape, k_cache.shape[2])
    return block_attention_kernel(
        q, k_cache, v_cache, start, causal=causal, window=window, config=config
    )
