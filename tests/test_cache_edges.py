"""Where a cache, a chunk or a text ends: the tokens stay those of plain decoding."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import decode
from dspark_jax.cache import capacity
from dspark_jax.state import Proposal
from dspark_jax.verify import emit
from tests.tiny import (
    Request,
    agreeing_params,
    decoding,
    plain_config,
    quick_compilation,
    run,
    run_alone,
    tiny_config,
)

MAX_LENGTH, CHUNK = 40, 8
CONFIG = tiny_config(block=5, max_length=MAX_LENGTH, prefill_chunk=CHUNK, sampled=False)
PLAIN = plain_config(CONFIG)


@pytest.fixture(autouse=True, scope="module")
def compile_quickly():
    with quick_compilation():
        yield


@pytest.fixture(scope="module")
def params():
    return agreeing_params(CONFIG)


def prompt(length: int) -> list[int]:
    return [(5 * i + 2) % 60 for i in range(length)]


def long_text(params, request: Request) -> list[int]:
    """Plain greedy text decoded in a cache with room to spare."""
    roomy = decoding(PLAIN, max_length=4 * MAX_LENGTH)
    return run_alone(roomy, params, request).tokens


@pytest.mark.parametrize("remainder", range(CHUNK))
def test_a_full_cache_at_every_remainder_of_the_chunk(params, remainder: int) -> None:
    length = 2 * CHUNK + remainder
    request = Request(prompt(length), max_tokens=MAX_LENGTH - length)
    (drafted,), state = run(CONFIG, params, [request])
    assert drafted.tokens == run_alone(PLAIN, params, request).tokens
    assert drafted.tokens == long_text(params, request)
    assert len(drafted.tokens) == MAX_LENGTH - length
    assert state.cached.tolist() == [MAX_LENGTH]  # wherever its last round would have ended
    assert max(drafted.acceptance_lengths) > 1


def test_the_longest_prompt_and_a_single_token(params) -> None:
    request = Request(prompt(MAX_LENGTH - 1), max_tokens=1)
    drafted = run_alone(CONFIG, params, request)
    assert drafted.tokens == long_text(params, request)
    assert len(drafted.acceptance_lengths) == 1  # the loop asks before, not after, the round


@pytest.mark.parametrize("length", [1, CHUNK - 1, CHUNK, CHUNK + 1])
def test_a_prompt_around_the_chunk(params, length: int) -> None:
    request = Request(prompt(length), max_tokens=16)
    assert run_alone(CONFIG, params, request).tokens == long_text(params, request)


def test_the_caches_hold_the_trained_block_and_the_padded_chunk() -> None:
    """The draft runs all of its block, however few of its drafts are used."""
    block = CONFIG.draft_network.block_size
    for length in range(MAX_LENGTH, MAX_LENGTH + CHUNK):
        assert capacity(decoding(CONFIG, max_length=length, num_drafts=2)) >= length + block
    assert capacity(decoding(CONFIG, prefill_chunk=MAX_LENGTH - 1)) >= 2 * (MAX_LENGTH - 1)


def test_a_shorter_request_after_a_full_one_in_the_same_state(params) -> None:
    full = Request(prompt(20), max_tokens=MAX_LENGTH - 20)
    _, state = run(CONFIG, params, [full])
    short = Request([9, 8, 7], max_tokens=12)
    again, _ = run(CONFIG, params, [short], state=state)
    assert again == [run_alone(CONFIG, params, short)]


def test_garbage_rows_are_never_read(params) -> None:
    rng = np.random.default_rng(0)

    def poison(x: jax.Array) -> jax.Array:
        return jnp.asarray(rng.choice([-1e6, 1e6], size=x.shape), x.dtype)

    state = decode.init_state(CONFIG, 2)
    state = state.replace(
        target=jax.tree.map(poison, state.target),
        draft=jax.tree.map(poison, state.draft),
        context=jax.tree.map(poison, state.context),
    )
    requests = [Request(prompt(3), 20), Request(prompt(11), 20)]
    poisoned, _ = run(CONFIG, params, requests, state=state)
    assert poisoned == run(CONFIG, params, requests)[0]


def test_a_stop_token_at_each_index(params) -> None:
    """The stop is the first token, a draft at any place of the block, or the bonus."""
    request = Request(prompt(3), max_tokens=30)
    plain = long_text(params, request)
    free = run_alone(CONFIG, params, request)
    ends = np.cumsum([1, *free.acceptance_lengths])  # tokens known after each round
    places = set()
    for token in dict.fromkeys(plain):
        stopped = run_alone(
            CONFIG, params, Request(request.prompt, request.max_tokens, stop_ids=[60, token])
        )
        index = plain.index(token)
        assert stopped.tokens == plain[: index + 1]
        rounds = int(np.searchsorted(ends, index + 1))
        assert len(stopped.acceptance_lengths) == rounds
        if rounds == 0:
            places.add("first")
            continue
        inside = index - int(ends[rounds - 1])
        bonus = inside == free.acceptance_lengths[rounds - 1] - 1
        assert stopped.acceptance_lengths[-1] == inside + 1
        assert stopped.proposal_lengths[-1] == (CONFIG.decode.num_drafts if bonus else inside + 1)
        places.add("bonus" if bonus else inside)
    assert {"first", "bonus", 0, 1} <= places


def test_drafts_behind_a_stop_count_as_neither_accepted_nor_proposed() -> None:
    state = decode.init_state(CONFIG, 1)
    state = state.replace(
        done=jnp.array([False]),
        limit=jnp.array([MAX_LENGTH]),
        stop_ids=state.stop_ids.at[0, 0].set(7),
    )
    proposal = Proposal(
        tokens=jnp.array([[5, 7, 3, 4, 2]]),
        length=jnp.array([5]),
        probs=jnp.zeros((1, 5, 0)),
        confidence=jnp.zeros((1, 0)),
    )
    _, counts = emit(proposal, jnp.array([4]), jnp.array([9]), state)
    assert counts.tolist() == [[2, 2, 2, 1]]


def test_a_stop_past_the_cap_does_not_count(params) -> None:
    request = Request(prompt(3), max_tokens=30)
    plain = long_text(params, request)
    token = plain[-1]
    cap = plain.index(token)
    capped = run_alone(CONFIG, params, Request(request.prompt, cap, stop_ids=[token]))
    assert capped.tokens == plain[:cap]
