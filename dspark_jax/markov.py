"""The Markov heads: one step function each (vanilla, gated, rnn), one shared scan over the block.

A head turns the previous token (and the slot's hidden state) into a row of width R; W2 turns that
row into a correction of the slot's base logits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from dspark_jax.config import DraftConfig
from dspark_jax.layers import Embedding, Linear
from dspark_jax.sharding import per_device, spec
from pallas_kernels.markov_walk import markov_walk
from pallas_kernels.platform import unroll_scans
from pallas_kernels.projection import matmul_precision, project

Choose = Callable[[Any, Array], tuple[Array, Array]]  # (slot, logits) -> (place, law)


class MarkovHead(nnx.Module):
    """W1 [V, R] over target ids, W2 [Vd, R] over draft ids, and the gate or cell between."""

    def __init__(self, config: DraftConfig, *, dtype: Any) -> None:
        rank, width = config.markov_rank, config.layers.hidden_size
        self.kind, self.rank = config.markov, rank
        self.markov_w1 = Embedding(config.vocab_size, rank, dtype=dtype)
        self.markov_w2 = Embedding(config.draft_vocab_size, rank, dtype=dtype)
        if self.kind == "gated":
            self.gate_proj = Linear(rank, width + rank, bias=True, dtype=dtype)
        if self.kind == "rnn":
            self.joint_proj = Linear(3 * rank, 2 * rank + width, bias=True, dtype=dtype)

    def step(
        self, state: Float[Array, "B R"], previous: Int[Array, " B"], hidden: Float[Array, "B D"]
    ) -> tuple[Float[Array, "B R"], Float[Array, "B R"]]:
        """The row that W2 maps to the correction, and the next state (unused but by rnn)."""
        embedded = self.markov_w1(previous)
        if self.kind == "vanilla":
            return embedded, state
        if self.kind == "gated":
            gate = self.gate_proj(jnp.concatenate([hidden, embedded], axis=-1))
            return jax.nn.sigmoid(gate) * embedded, state
        joint = self.joint_proj(jnp.concatenate([state, embedded, hidden], axis=-1))
        gate, candidate, output = jnp.split(joint, 3, axis=-1)
        gate = jax.nn.sigmoid(gate)
        # The output reads the old state: what is written here first acts on the next slot.
        return jnp.tanh(output), gate * state + (1 - gate) * jnp.tanh(candidate)

    def correction(
        self, row: Float[Array, "B R"], places: Int[Array, "B M"] | None
    ) -> Float[Array, "B M"]:
        """row @ W2.T in float32, of the given draft ids only when `places` names them."""
        weight = self.markov_w2.weight[...]
        if places is None:
            return project(row, weight, jnp.float32)
        return jnp.einsum(
            "br,bmr->bm",
            row,
            weight[places],
            precision=matmul_precision(row.dtype),
            preferred_element_type=jnp.float32,
        )


def walk(
    head: MarkovHead | None,
    base: Float[Array, "B P M"],
    hidden: Float[Array, "B P D"],
    anchor: Int[Array, " B"],
    support: Callable[[Array, Array], Array],
    places: Int[Array, "B P M"] | None,
    choose: Choose,
    greedy: str | None = None,
) -> tuple[Int[Array, "B P"], Float[Array, "B P M"], Float[Array, "B P M"]]:
    """Scan the block left to right: correct the base logits by the previous token, then choose.

    `places` are the draft ids that the M columns stand for (None: all, in order);
    `support(slot, place)` maps a chosen column to the target id that the next slot sees.
    `greedy` names the implementation of the op that walks a whole vocabulary greedily under a
    vanilla head, in the place of `choose`. Returns target ids, the law `choose` published for each
    slot, and the corrected logits.
    """
    batch, count, _ = base.shape
    if greedy is not None and head is not None and head.kind == "vanilla":
        weights = (head.markov_w1.weight[...], head.markov_w2.weight[...])
        slots, whole = spec("B"), spec("-")
        greedy_walk = per_device(
            partial(markov_walk, implementation=greedy),
            (slots, whole, whole, slots),
            (slots, slots),
        )
        tokens, logits = greedy_walk(base, *weights, anchor)
        return tokens, jnp.zeros((batch, count, 0), jnp.float32), logits

    def step(carry: tuple[Array, Array], slot: Array) -> tuple[Any, Any]:
        previous, state = carry
        logits = base[:, slot]
        if head is not None:
            row, state = head.step(state, previous, hidden[:, slot])
            logits = logits + head.correction(row, None if places is None else places[:, slot])
        place, law = choose(slot, logits)
        token = support(slot, place).astype(jnp.int32)
        return (token, state), (token, law, logits)

    start = jnp.zeros((batch, head.rank if head else 0), hidden.dtype)
    _, (tokens, laws, logits) = jax.lax.scan(
        step, (anchor, start), jnp.arange(count), unroll=unroll_scans()
    )
    return tokens.T, laws.swapaxes(0, 1), logits.swapaxes(0, 1)
