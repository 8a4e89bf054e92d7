"""Acceptance as it is told: drafts of random weights that are accepted with known chances.

Weights of true shapes cost what true weights cost, but nothing that they draft is accepted. Here
the chance that a draft is accepted comes from a curve, the confidence head reports that chance, and
coins decide; everything is computed as it is in a real round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dspark_jax import rounds
from dspark_jax.state import DecodeState, StepOutput


@dataclass(frozen=True)
class Curve:
    """In each round a row draws the chance that a draft of it is accepted from `low` to `high`.

    Every second row draws from `others`, where that is given.
    """

    low: float
    high: float
    others: tuple[float, float] | None = None

    def bounds(self, batch: int) -> Float[Array, "2 B"]:
        """Lowest and highest chance of each row."""
        pairs = ((self.low, self.high), self.others or (self.low, self.high))
        return jnp.array([pairs[row % 2] for row in range(batch)], jnp.float32).T


CURVES = {
    "hopeless": Curve(0.05, 0.05),
    "poor": Curve(0.35, 0.35),
    "fair": Curve(0.65, 0.65),
    "good": Curve(0.85, 0.85),
    "excellent": Curve(0.97, 0.97),
    "mixed rows": Curve(0.9, 0.9, others=(0.3, 0.3)),
    "mixed rounds": Curve(0.1, 0.98),
}


@dataclass(frozen=True)
class Acceptance:
    """What decides in a traced program: a curve's bounds, and the number of the call."""

    bounds: Float[Array, "2 B"]
    call: Int[Array, ""]

    def _keys(self, cached: Int[Array, " B"], purpose: int) -> Array:
        """One key a row and round: the anchor's position tells the round of a call."""
        root = jax.random.fold_in(jax.random.fold_in(jax.random.key(1), purpose), self.call)
        rows = jax.vmap(jax.random.fold_in, (None, 0))(root, jnp.arange(cached.shape[0]))
        return jax.vmap(jax.random.fold_in)(rows, cached)

    def chances(self, cached: Int[Array, " B"]) -> Float[Array, " B"]:
        """The chance that each draft of a row is accepted in the round of these anchors."""
        quality = jax.vmap(jax.random.uniform)(self._keys(cached, 0))
        return self.bounds[0] + (self.bounds[1] - self.bounds[0]) * quality

    def coins(self, cached: Int[Array, " B"], drafts: int) -> Float[Array, "B P"]:
        return jax.vmap(lambda key: jax.random.uniform(key, (drafts,)))(self._keys(cached, 1))


@contextmanager
def accepted_by(acceptance: Acceptance) -> Iterator[None]:
    """Rounds traced inside accept as they are told."""
    with ExitStack() as stack:
        for name, wrap in (("propose", _confident), ("verify", _judged)):
            original = getattr(rounds, name)
            stack.enter_context(patch.object(rounds, name, wrap(original, acceptance)))
        yield


def _confident(original: Callable[..., Any], acceptance: Acceptance) -> Callable[..., Any]:
    def propose(config: Any, params: Any, state: DecodeState) -> Any:
        after, proposal = original(config, params, state)
        chance = acceptance.chances(state.cached)
        logits = jnp.broadcast_to(jax.scipy.special.logit(chance)[:, None], proposal.tokens.shape)
        told = proposal.confidence  # computed, so that it costs what it costs
        return after, replace(proposal, confidence=jnp.where(jnp.isnan(told), told, logits))

    return propose


def _judged(original: Callable[..., Any], acceptance: Acceptance) -> Callable[..., Any]:
    def verify(logits: Any, proposal: Any, state: DecodeState, decode: Any) -> StepOutput:
        output = original(logits, proposal, state, decode)
        drafts = proposal.tokens.shape[1]
        if not drafts:
            return output
        chance = acceptance.chances(state.cached)
        passed = acceptance.coins(state.cached, drafts) < chance[:, None]
        passed &= jnp.arange(drafts) < proposal.length[:, None]
        accepted = jnp.sum(jnp.cumprod(passed, axis=1), axis=1, dtype=jnp.int32)
        done = (state.cached + accepted + 1 >= state.limit).astype(jnp.int32)
        counts = jnp.stack([accepted + 1, accepted, proposal.length, done], axis=1)
        return replace(output, counts=jnp.where(state.done[:, None], output.counts, counts))

    return verify
