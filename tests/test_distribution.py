"""The whole loop draws from the target's law: a chi-square test on the embedded pair."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chi2_contingency

from dspark_jax import decode
from dspark_jax.request import SamplingParams
from dspark_jax.rows import row_settings
from dspark_jax.state import MAX_ROUNDS
from tests.pairs import DEMO, load_pair

BATCH, TOKENS = 250, 3
PROMPT = [323, 288, 2314, 266, 68, 1021, 76, 652, 325, 262, 426, 3013]
SIZE = {"max_length": 32, "prefill_chunk": 16}
SETTINGS = SamplingParams(max_tokens=TOKENS, temperature=0.7, top_p=0.9)


def waiting_rows(config: Any, params: Any) -> Any:
    """A batch whose rows all wait at the end of the same prompt, its last token the anchor."""
    state = decode.init_state(config, 1)
    row = row_settings(len(PROMPT) - 1, SETTINGS)
    state = decode.admit(config, state, jnp.int32(0), row)
    chunk = np.zeros(config.decode.prefill_chunk, np.int32)
    chunk[: len(PROMPT) - 1] = PROMPT[:-1]
    state, _ = decode.prefill(
        config,
        params,
        state,
        jnp.int32(0),
        jnp.asarray(chunk),
        jnp.int32(len(PROMPT) - 1),
        jnp.bool_(True),
    )
    state = state.replace(anchor=jnp.asarray(PROMPT[-1:], jnp.int32), done=jnp.array([False]))
    return jax.tree.map(lambda x: jnp.repeat(x, BATCH, axis=0), state)


def first_tokens(config: Any, params: Any, seeds: range) -> Counter[tuple[int, ...]]:
    """How often each sequence of the first three tokens comes, one draw a seed."""
    waiting = waiting_rows(config, params)
    seen: Counter[tuple[int, ...]] = Counter()
    for begin in seeds[::BATCH]:
        words = np.stack([np.zeros(BATCH), np.arange(begin, begin + BATCH)], axis=1)
        fresh = jax.tree.map(jnp.copy, waiting)
        state = fresh.replace(sampling=fresh.sampling.replace(seed=jnp.asarray(words, jnp.uint32)))
        _, out = decode.decode_rounds(config, params, state, jnp.int32(MAX_ROUNDS))
        for tokens, counts in zip(np.asarray(out.tokens), np.asarray(out.counts), strict=True):
            rounds = zip(tokens, counts[:, 0], strict=True)
            drawn = np.concatenate([row[:emitted] for row, emitted in rounds])
            seen[tuple(drawn[:TOKENS].tolist())] += 1
    return seen


@pytest.fixture(scope="module")
def plain() -> Counter[tuple[int, ...]]:
    return first_tokens(*load_pair(DEMO, plain=True, **SIZE), range(20_000))


@pytest.mark.parametrize(("rejection", "draws"), [("token", 20_000), ("block", 5_000)])
def test_first_three_tokens_follow_plain_sampling(plain: Any, rejection: str, draws: int) -> None:
    """Homogeneity of speculative and plain draws on disjoint seeds; rare cells are pooled."""
    config, params = load_pair(DEMO, num_drafts=TOKENS, rejection=rejection, **SIZE)
    drafted = first_tokens(config, params, range(1_000_000, 1_000_000 + draws))
    cells = sorted(plain | drafted)
    table = np.array([[sample[cell] for cell in cells] for sample in (plain, drafted)])
    sums = table.sum(axis=1)
    expected = sums.min() / sums.sum() * table.sum(axis=0)
    rare = expected < 5
    table = np.concatenate([table[:, ~rare], table[:, rare].sum(axis=1, keepdims=True)], axis=1)
    assert table.shape[1] > 50
    assert chi2_contingency(table).pvalue > 1e-3
