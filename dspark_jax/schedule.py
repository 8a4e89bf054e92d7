"""The hardware-aware prefix scheduler: which drafts of a batch are verified (paper, Algorithm 1).

What makes it lossless is an order. Drafts are taken in the order of their survival, which depends
on earlier tokens only, and whether one is taken depends on nothing that comes after it in that
order: not on its own token, and not on later ones of its row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dspark_jax.state import Gains

MEMORY = 32  # rounds that a row's mean goes back
LEAST_ROUNDS = 8  # after which a row's mean counts in full
FIRST_WAIT = 2  # plain rounds before a trial of drafting; one that does not pay doubles them
TRIAL_SHARE = 0.01  # of the time of plain rounds: what trials of the same rows come to


def confidences(
    logits: Float[Array, "B P"], temperatures: Sequence[float] = ()
) -> Float[Array, "B P"]:
    """Chance that each draft is accepted after those before it, calibrated by position."""
    if temperatures:
        logits = logits / jnp.asarray(temperatures[: logits.shape[1]], jnp.float32)
    return jax.nn.sigmoid(logits)


def survival(confidence: Float[Array, "B P"]) -> Float[Array, "B P"]:
    """Chance that a row's drafts are accepted up to each of them (paper, a_{r,j})."""
    return jnp.cumprod(confidence, axis=1)


def choose_tier(
    survivals: Float[Array, "B P"],
    active: Bool[Array, " B"],
    curve: Float[Array, " N"],
    tiers: Sequence[int],
    costs: Float[Array, " K"],
) -> Int[Array, ""]:
    """Index of the cheapest of the sizes `tiers` that hold what Algorithm 1 takes.

    `curve[n]` is the cost of a round that verifies n tokens, anchors included, and `costs` those of
    the sizes: packing can make a smaller one dearer than the next.
    """
    running = jnp.sum(active, dtype=jnp.int32)
    items, order = _in_order(survivals, active)
    chosen = running + worthwhile(items[order], running, curve)
    holds = chosen <= jnp.asarray(tiers, jnp.int32)
    return jnp.argmin(jnp.where(holds, costs, jnp.inf)).astype(jnp.int32)


def fill_tier(
    survivals: Float[Array, "B P"], active: Bool[Array, " B"], size: Int[Array, ""] | int
) -> Int[Array, " B"]:
    """Drafts of each row to verify where `size` tokens can be: the likeliest to survive."""
    room = size - jnp.sum(active, dtype=jnp.int32)
    _, order = _in_order(survivals, active)
    places = jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=order.dtype))
    taken = (places.reshape(survivals.shape) < room) & active[:, None]
    return jnp.sum(taken, axis=1, dtype=jnp.int32)


def _in_order(
    survivals: Float[Array, "B P"], active: Bool[Array, " B"]
) -> tuple[Float[Array, " n"], Int[Array, " n"]]:
    """Survival of all drafts, and their order: falling, of equal ones the earlier first."""
    items = jnp.where(active[:, None], survivals, -1.0).ravel()
    return items, jnp.argsort(items, stable=True, descending=True)


def worthwhile(
    ordered: Float[Array, " n"], running: Int[Array, ""], curve: Float[Array, " N"]
) -> Int[Array, ""]:
    """How many of the drafts, ordered by survival, Algorithm 1 takes.

    It stops at the first that does not raise expected tokens over cost. To look further would make
    the choice depend on confidences that depend on the tokens it is about.
    """
    counts = running + jnp.arange(ordered.size + 1)
    expected = running + jnp.cumsum(jnp.pad(jnp.maximum(ordered, 0.0), (1, 0)))
    rate = expected / curve[jnp.minimum(counts, curve.size - 1)]
    better = (rate[1:] > rate[:-1]) & (ordered >= 0)
    return jnp.sum(jnp.cumprod(better), dtype=jnp.int32)


# Whether a round drafts at all: decided before it, from rounds that are over.


def init_gains(batch: int) -> Gains:
    """Nothing is known of any row."""
    return Gains(
        rounds=jnp.zeros((batch,), jnp.int32),
        tokens=jnp.zeros((batch,), jnp.float32),
        price=jnp.float32(0),
        idle=jnp.int32(0),
        wait=jnp.int32(FIRST_WAIT),
    )


def admit_gains(gains: Gains, slot: Int[Array, ""]) -> Gains:
    """Forget a slot's last row."""
    return replace(
        gains, rounds=gains.rounds.at[slot].set(0), tokens=gains.tokens.at[slot].set(0.0)
    )


def pays(gains: Gains, active: Bool[Array, " B"]) -> Bool[Array, ""]:
    """Whether drafted rounds have lately emitted more for their price than plain ones would.

    A row of which little is known counts little, and as the mean of the others; where little is
    known of all together they draft.
    """
    known = jnp.where(active, jnp.minimum(gains.rounds, LEAST_ROUNDS) / LEAST_ROUNDS, 0.0)
    total = jnp.sum(known)
    mean = jnp.sum(known * gains.tokens) / jnp.maximum(total, 1.0)
    return (total < 1) | (mean > gains.price)


def due(gains: Gains, active: Bool[Array, " B"]) -> Bool[Array, ""]:
    """Whether the next round drafts: it pays, or it is time for a trial.

    That is so after `wait` plain rounds, and where half of the rows are new since the last trial:
    what is known of the others says nothing of them.
    """
    new = active & (gains.rounds == 0)
    changed = (2 * jnp.sum(new) >= jnp.sum(active)) & (gains.idle >= FIRST_WAIT)
    return pays(gains, active) | (gains.idle >= gains.wait) | changed


def after_drafting(
    gains: Gains,
    emitted: Int[Array, " B"],
    active: Bool[Array, " B"],
    price: Float[Array, ""],
    paid: Bool[Array, ""],
) -> Gains:
    """Take a drafted round into the means; where it was a trial (not `paid`), with more weight.

    `price` is what the round cost, in plain rounds of the same batch. After a trial that did not
    pay, the next comes later. The dearer, the rarer trials become: they are a greater loss at large
    batches than at small ones.
    """
    before = jnp.where(paid, gains.rounds, jnp.minimum(gains.rounds, LEAST_ROUNDS))
    rounds = jnp.where(active, jnp.minimum(before + 1, MEMORY), gains.rounds)
    weight = jnp.where(active, 1.0 / jnp.maximum(rounds, 1), 0.0)
    share = jnp.where(paid & (gains.price > 0), 1.0 / LEAST_ROUNDS, 1.0)  # batches change
    mean_price = gains.price + share * (price - gains.price)
    won = jnp.sum(jnp.where(active, emitted, 0)) > price * jnp.sum(active)
    longest = ((mean_price - 1) / TRIAL_SHARE).astype(jnp.int32)
    later = jnp.maximum(jnp.minimum(2 * gains.wait, longest), FIRST_WAIT)
    return Gains(
        rounds=rounds,
        tokens=gains.tokens + weight * (emitted - gains.tokens),
        price=mean_price,
        idle=jnp.int32(0),
        wait=jnp.where(paid | won, FIRST_WAIT, later),
    )
