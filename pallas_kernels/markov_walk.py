"""The sequential part of drafting with the vanilla Markov head: one token after another.

Slot s of batch row b has base logits `base[b, s]`. They are corrected by the token before it,
`logits = base[b, s] + w1[previous] @ w2.T`, and the slot's token is the first of the largest
`logits * scale[b] + noise[b, s]`, or of the largest logits when there is no noise. With Gumbel
noise and the inverse temperature that draws from softmax(logits * scale). The corrected logits of
all slots are returned beside the tokens: they are what the law is made of.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.platform import resolve_implementation, unroll_scans
from pallas_kernels.tuning import tuned
from pallas_kernels.walk_step import FAR, Step, walk_step

MAX_BATCH = 64


@dataclass(frozen=True)
class Config:
    """Sizes of the kernel."""

    cells: int = 132
    stages: int = 4  # tiles of w2 in flight

    def __post_init__(self) -> None:
        if min(self.cells, self.stages) < 1:
            raise ValueError(f"sizes must be positive, got {self}")


@dataclass(frozen=True)
class Spec:
    """A shape that is served: tests, benches and tuning read these."""

    batch: int
    slots: int = 7
    vocabulary: int = 151936
    rank: int = 256
    noise: bool = False


SPECS = (
    *(Spec(batch) for batch in (1, 8, 32)),
    *(Spec(batch, noise=True) for batch in (1, 8, 32)),
    Spec(1, vocabulary=4096, rank=64),
    Spec(2, vocabulary=32000, rank=256, noise=True),
)


def markov_walk_reference(
    base: Float[Array, "B P V"],
    w1: Float[Array, "W R"],
    w2: Float[Array, "V R"],
    anchor: Int[Array, " B"],
    noise: Float[Array, "B P V"] | None = None,
    scale: Float[Array, " B"] | None = None,
) -> tuple[Int[Array, "B P"], Float[Array, "B P V"]]:
    """Compute the op in jax.numpy: one scan over the slots."""
    precision = lax.Precision.HIGHEST if w1.dtype == jnp.float32 else None

    def step(previous: Array, slot: Array) -> tuple[Array, tuple[Array, Array]]:
        correction = jnp.einsum(
            "br,vr->bv",
            w1[previous],
            w2,
            precision=precision,
            preferred_element_type=jnp.float32,
        )
        logits = base[:, slot] + correction
        score = logits
        if noise is not None and scale is not None:
            score = logits * scale[:, None] + noise[:, slot]
        best = score.max(axis=-1, keepdims=True)  # two plain reductions: a CPU vectorises them
        ids = jnp.arange(score.shape[-1], dtype=jnp.int32)
        token = jnp.where(score == best, ids, ids[-1]).min(axis=-1)
        return token, (token, logits)

    slots = jnp.arange(base.shape[1])
    _, (tokens, logits) = lax.scan(step, anchor, slots, unroll=unroll_scans())
    return tokens.T, logits.swapaxes(0, 1)


@partial(jax.jit, static_argnames=("config",))
def markov_walk_kernel(
    base: Float[Array, "B P V"],
    w1: Float[Array, "W R"],
    w2: Float[Array, "V R"],
    anchor: Int[Array, " B"],
    noise: Float[Array, "B P V"] | None = None,
    scale: Float[Array, " B"] | None = None,
    *,
    config: Config,
) -> tuple[Int[Array, "B P"], Float[Array, "B P V"]]:
    """Compute the op with one kernel a slot; the last slot's tokens are found outside."""
    batch, slots, _ = base.shape
    logits, tokens = jax.new_ref(base), jax.new_ref(jnp.zeros((batch, slots), jnp.int32))
    before: tuple[Any, ...] = (anchor,)
    drawn_by = (anchor, anchor)  # unread when there is no noise
    if noise is not None and scale is not None:
        drawn_by = (noise, jnp.pad(scale, (0, -batch % 8)))
    for slot in range(slots):
        step = Step(base.shape, w1.shape[1], w1.dtype, slot, noise is not None, config)
        before = walk_step(step)(tokens, logits, w1, w2, *drawn_by, *before)
    score, token = before
    last = jnp.where(score == score.max(axis=0), token, FAR).min(axis=0)[:batch]
    drawn = jax.freeze(tokens).at[:, slots - 1].set(last.astype(jnp.int32))
    return drawn, jax.freeze(logits)


def shape_name(batch: int, vocabulary: int, rank: int) -> str:
    """Name what sizes are tuned for."""
    return f"batch {batch} vocabulary {vocabulary} rank {rank}"


def choose_config(batch: int, vocabulary: int, rank: int) -> Config:
    """Return the tuned sizes, or sizes that suit most shapes."""
    if (fields := tuned("markov_walk", shape_name(batch, vocabulary, rank))) is not None:
        return Config(**fields)
    return Config(stages=4 if batch <= 8 else 2)


def kernel_objection(base: Float[Array, "B P V"], w2: Float[Array, "V R"]) -> str | None:
    """Say why the kernel does not take these operands, or return None."""
    batch, _, vocabulary = base.shape
    if w2.dtype != jnp.bfloat16 or base.dtype != jnp.float32:
        return f"the walk kernel takes bfloat16 heads, float32 logits: {w2.dtype}, {base.dtype}"
    if batch > MAX_BATCH or (batch > 8 and batch % 8):
        return f"the walk kernel takes 1 to 8 or 8 n batch rows up to {MAX_BATCH}, got {batch}"
    if w2.shape[1] % 64 or w2.shape[1] > 256:
        return f"the walk kernel takes ranks of 64, 128, 192 or 256, got {w2.shape[1]}"
    if vocabulary % 8 or vocabulary >= FAR:
        return f"the walk kernel takes a vocabulary of 8 n, got {vocabulary}"
    return None


def markov_walk(
    base: Float[Array, "B P V"],
    w1: Float[Array, "W R"],
    w2: Float[Array, "V R"],
    anchor: Int[Array, " B"],
    noise: Float[Array, "B P V"] | None = None,
    scale: Float[Array, " B"] | None = None,
    *,
    implementation: str = "auto",
    config: Config | None = None,
) -> tuple[Int[Array, "B P"], Float[Array, "B P V"]]:
    """Return the tokens of all slots and the corrected logits; see the module's contract.

    Args:
        base: float32 logits of the slots, not yet corrected; donate them to write in place.
        w1, w2: the Markov head's two matrices; token ids are rows of both.
        anchor: the token before slot 0.
        noise: added to the scaled logits of each slot; None takes the largest logits.
        scale: of the logits under noise, such as an inverse temperature.
        implementation: "auto", "pallas" or "xla". The kernel takes a bfloat16 head of rank 64 n
            up to 256, a vocabulary of 8 n and 1 to 8 or 8 n batch rows up to 64; for other
            operands "auto" takes the reference.
        config: sizes of the kernel; by default the tuned ones.

    Raises:
        ValueError: the shapes do not fit, or "pallas" is named and cannot run these operands or
            on this device.
    """
    if w2.shape != (base.shape[2], w1.shape[1]):
        raise ValueError(f"w1 {w1.shape} and w2 {w2.shape} do not fit logits {base.shape}")
    if (noise is None) != (scale is None):
        raise ValueError("noise and scale must both be given or both be None")
    operands = (base, w1, w2, anchor, noise, scale)
    objection = kernel_objection(base, w2)
    if resolve_implementation(implementation, unsupported=objection) == "xla":
        return markov_walk_reference(*operands)
    config = config or choose_config(base.shape[0], base.shape[2], w2.shape[1])
    return markov_walk_kernel(*operands, config=config)
