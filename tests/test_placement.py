"""Rows that move to another slot and another batch, and rows that are put to rest."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import decode, placement
from dspark_jax.config import NgramConfig
from dspark_jax.memory import plan_memory
from dspark_jax.placement import move_rows, release
from tests.tiny import (
    Request,
    decoding,
    many_rounds,
    one_round,
    plain_config,
    quick_compilation,
    random_params,
    run_alone,
    start,
    tiny_config,
)

CONFIG = tiny_config(controls=True)
NGRAM = replace(CONFIG, draft=NgramConfig(), decode=replace(CONFIG.decode, num_drafts=3))
REQUESTS = [Request([3, 4, 5], 20), Request(list(range(9)), 20, temperature=1.0, seed=7)]


@pytest.fixture(autouse=True, scope="module")
def compile_quickly():
    with quick_compilation():
        yield


def random_state(config: Any, batch: int) -> Any:
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda x: jnp.asarray(rng.integers(0, 2, x.shape), x.dtype),
        decode.init_state(config, batch),
    )


@pytest.mark.parametrize("config", [CONFIG, NGRAM, plain_config(CONFIG)], ids=["pair", "ngram", ""])
@pytest.mark.parametrize("rows", [[2], [1, 0], [2, 1, 0, 0, 0]])
def test_every_slot_holds_what_its_old_one_held(config: Any, rows: list[int]) -> None:
    state = random_state(config, 3)
    before = jax.tree.map(np.asarray, state)
    after = move_rows(state, rows)
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(old[rows], new)


def test_moving_holds_one_array_twice_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config(max_length=400)
    state, peak, take = random_state(config, 2), 0, placement._placed_take
    arrays = jax.tree.leaves((state.target, state.draft))
    array, cache = 2 * arrays[0].nbytes, 2 * sum(x.nbytes for x in arrays)

    def watched(rows: Any, places: Any) -> Any:
        nonlocal peak
        taken = take(rows, places)
        if isinstance(rows, jax.Array):
            arrays.append(taken)
            peak = max(peak, sum(x.nbytes for x in arrays if not x.is_deleted()))
        return taken

    monkeypatch.setattr(placement, "_placed_take", watched)
    move_rows(state, [0, 1, 0, 0])
    plan = plan_memory(config, 4)
    assert plan.cache == cache
    assert peak == cache + array // 2
    assert plan.workspace >= array


def test_rows_go_on_in_another_slot_and_a_released_one_rests() -> None:
    config = decoding(CONFIG, controls=False)
    params, state = random_params(config), decode.init_state(config, 2)
    firsts = []
    for slot, request in enumerate(REQUESTS):
        state, first = start(config, params, state, slot, request)
        firsts.append(first)
    state, tokens, counts = one_round(config, params, state)
    begun = [
        [first, *np.asarray(row)[0, : count[0, 0]].tolist()]
        for first, row, count in zip(firsts, tokens, np.asarray(counts), strict=True)
    ]
    state = move_rows(state, [1, 0, 0, 0])
    state = release(config, state, np.array([False, True, True, True]))
    assert state.done.tolist() == [False, True, True, True]
    assert state.cached.tolist()[1:] == state.context_len.tolist()[1:] == [0, 0, 0]
    rested = jax.tree.map(np.asarray, (state.anchor, state.cached))
    while not bool(state.done.all()):
        state, tokens, counts = many_rounds(config, params, state)
        for row, (emitted, *_) in zip(np.asarray(tokens)[0], np.asarray(counts)[0], strict=True):
            begun[1] += row[:emitted].tolist()
        assert np.asarray(counts)[1:, :, 0].sum() == 0
    np.testing.assert_array_equal(rested[0][1:], np.asarray(state.anchor)[1:])
    assert begun[1][:20] == run_alone(config, params, REQUESTS[1]).tokens
