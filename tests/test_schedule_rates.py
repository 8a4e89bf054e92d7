"""What the schedule is worth where its costs and confidences are true: no clock, no network."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench.synthetic import CURVES
from dspark_jax import schedule
from dspark_jax.tiers import BatchCosts, verified_tiers

DRAFTS, ROUNDS, WARM = 7, 512, 256
# Microseconds of a plain round and of the tiers of a drafted one. Plain and whole rounds are as
# measured on an H200 with Qwen3-8B shapes at 1,000 cached rows (batch 64: continued from there).
COSTS = {
    1: (4455, (5540, 5550, 5560, 5579)),
    8: (4806, (6000, 6400, 6700, 6973)),
    32: (6204, (9100, 9700, 10500, 11325)),
    64: (7600, (12500, 14000, 16250, 18500)),
}
ABSORBED = 1.004  # a plain round that also takes its share of context in


@partial(jax.jit, static_argnums=0)
def rounds_of(costs: BatchCosts, bounds: Any, key: Any) -> Any:
    """(time, tokens) of each scheduled round, and tokens of each with every draft verified."""
    batch, sizes = costs.batch, costs.tokens
    active = jnp.ones(batch, bool)
    curve, times = jnp.asarray(costs.envelope()), jnp.asarray(costs.rounds)

    def step(gains: Any, key: Any) -> Any:
        quality, flips = jax.random.split(key)
        chance = bounds[0] + (bounds[1] - bounds[0]) * jax.random.uniform(quality, (batch,))
        passed = jax.random.uniform(flips, (batch, DRAFTS)) < chance[:, None]

        def emitted(lengths: Any) -> Any:
            kept = passed & (jnp.arange(DRAFTS) < lengths[:, None])
            return jnp.sum(jnp.cumprod(kept, axis=1), axis=1) + 1

        alive = schedule.survival(jnp.broadcast_to(chance[:, None], passed.shape))
        tier = schedule.choose_tier(alive, active, curve, sizes, times)
        lengths = schedule.fill_tier(alive, active, jnp.asarray(sizes)[tier])
        paid = schedule.pays(gains, active)
        drafting = paid | (gains.idle >= gains.wait)
        price = times[tier] / costs.plain
        drafted = schedule.after_drafting(gains, emitted(lengths), active, price, paid)
        rested = gains.replace(idle=gains.idle + 1)
        gains = jax.tree.map(partial(jnp.where, drafting), drafted, rested)
        time = jnp.where(drafting, times[tier], costs.plain)
        tokens = jnp.where(drafting, emitted(lengths).sum(), batch)
        return gains, (time, tokens, emitted(jnp.full(batch, DRAFTS)).sum())

    keys = jax.random.split(key, ROUNDS)
    return jax.lax.scan(step, schedule.init_gains(batch), keys)[1]


@pytest.mark.parametrize("batch", COSTS)
def test_no_curve_is_served_better_by_always_or_never_drafting(batch: int) -> None:
    """Once it knows the rows it is within 3 % of the better one, and above it for mixed ones."""
    plain, times = COSTS[batch]
    costs = BatchCosts(batch, plain * ABSORBED, verified_tiers(batch, DRAFTS + 1), times)
    found = {}
    for name, curve in CURVES.items():
        measured = rounds_of(costs, curve.bounds(batch), jax.random.key(3))
        time, tokens, whole = (np.asarray(x, np.float64)[WARM:].mean() for x in measured)
        found[name] = tokens / time / max(whole / times[-1], batch / plain)
    assert min(found.values()) > 0.97, found
    if batch >= 32:
        assert found["mixed rows"] > 1.05, found
        assert found["mixed rounds"] > 1.05, found
