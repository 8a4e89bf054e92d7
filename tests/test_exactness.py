"""Speculation never changes what a row says, and no row changes another one."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest

from dspark_jax import decode
from dspark_jax.state import MAX_ROUNDS
from tests.tiny import (
    Request,
    agreeing_params,
    decoding,
    many_rounds,
    one_round,
    plain_config,
    quick_compilation,
    random_params,
    run,
    run_alone,
    start,
    tiny_config,
    tiny_layers,
)

PROMPTS = ([7], [1, 2, 3], list(range(20, 28)), list(range(19)))  # chunk 8: 1, 1, 1 and 3 chunks


@pytest.fixture(autouse=True, scope="module")
def compile_quickly():
    with quick_compilation():
        yield


def requests(**settings) -> list[Request]:
    return [Request(prompt, max_tokens=20 + i, **settings) for i, prompt in enumerate(PROMPTS)]


def spoken(results) -> list[list[int]]:
    return [result.tokens for result in results]


@pytest.fixture(scope="module")
def agreeing():
    config = tiny_config(block=5)
    return config, agreeing_params(config)


@pytest.fixture(scope="module")
def greedy_text(agreeing):
    """Plain greedy text of the four prompts."""
    config = plain_config(decoding(agreeing[0], sampled=False))
    return spoken(run(config, agreeing[1], requests())[0])


@pytest.mark.parametrize("threshold", [0.0, 0.5])
def test_speculative_greedy_is_plain_greedy(agreeing, greedy_text, threshold: float) -> None:
    config = decoding(agreeing[0], sampled=False, confidence_threshold=threshold)
    together, _ = run(config, agreeing[1], requests())
    assert spoken(together) == greedy_text
    accepted = {n for result in together for n in result.acceptance_lengths}
    proposed = {n for result in together for n in result.proposal_lengths}
    assert len(accepted) >= 3, "the rows were to accept unevenly"
    assert (len(proposed) > 2) == (threshold > 0)


def test_greedy_rows_of_a_batch_are_their_solo_runs(agreeing) -> None:
    config = decoding(agreeing[0], sampled=False)
    together, _ = run(config, agreeing[1], requests())
    assert [run_alone(config, agreeing[1], request) for request in requests()] == together


def test_a_prefix_of_the_block_can_be_used(agreeing, greedy_text) -> None:
    config = decoding(agreeing[0], sampled=False, num_drafts=2)
    drafted, _ = run(config, agreeing[1], requests())
    assert spoken(drafted) == greedy_text
    assert max(n for r in drafted for n in r.acceptance_lengths) == 3


def test_greedy_rows_keep_their_text_among_sampled_ones(agreeing, greedy_text) -> None:
    mixed = requests(temperature=1.0, seed=5)
    for i, temperature in ((0, 0.0), (2, 9e-6)):
        mixed[i] = replace(mixed[i], temperature=temperature)
    results, _ = run(agreeing[0], agreeing[1], mixed)
    assert [spoken(results)[i] for i in (0, 2)] == [greedy_text[i] for i in (0, 2)]
    assert spoken(results)[3] != greedy_text[3]


SAMPLED = [
    Request([7], 20, temperature=1.0, seed=1),
    Request([1, 2, 3], 21, temperature=0.7, top_p=0.9, seed=2),
    Request(list(range(19)), 22, temperature=1.3, top_k=5, min_p=0.02, seed=2**63 + 5),
]


@pytest.mark.parametrize("rejection", ["token", "block", "gumbel"])
def test_a_sampled_row_depends_on_nothing_around_it(agreeing, rejection: str) -> None:
    config, params = decoding(agreeing[0], rejection=rejection), agreeing[1]
    alone = [run_alone(config, params, request) for request in SAMPLED]
    turned, _ = run(config, params, SAMPLED, slots=[3, 0, 2], batch=4)
    assert turned == alone
    assert run_alone(config, params, replace(SAMPLED[0], seed=9)).tokens != alone[0].tokens


def test_a_sampled_row_depends_on_nothing_that_held_its_slot() -> None:
    """With a draft whose context counts: rows that waited for it are not the next request's."""
    config = tiny_config()
    params = random_params(config)
    before, after = SAMPLED[2], replace(SAMPLED[1], max_tokens=30)
    _, state = run(config, params, [before])
    again, _ = run(config, params, [after], state=state)
    assert again == [run_alone(config, params, after)]


def test_more_rounds_than_a_call_can_run_are_cut(agreeing) -> None:
    config, params = plain_config(agreeing[0]), agreeing[1]
    state, _ = start(config, params, decode.init_state(config, 1), 0, Request([7], 40))
    state, _, counts = many_rounds(config, params, state, 2 * MAX_ROUNDS)
    assert int(state.cached[0]) == 1 + int(np.sum(np.asarray(counts)[0, :, 0])) == 1 + MAX_ROUNDS


def test_single_rounds_give_what_rounds_in_one_call_give(agreeing) -> None:
    config, params = agreeing
    together, _ = run(config, params, SAMPLED, batch=4)
    assert run(config, params, SAMPLED, batch=4, advance=one_round)[0] == together


def test_a_neighbour_may_come_and_go(agreeing) -> None:
    config, params = agreeing
    alone = run_alone(config, params, SAMPLED[2])
    state = decode.init_state(config, 4)
    state, first = start(config, params, state, 1, SAMPLED[2])
    tokens, filled = [first], False
    while not bool(state.done[1]):
        state, emitted, counts = many_rounds(config, params, state, 2)
        for row, (count, *_) in zip(np.asarray(emitted)[1], np.asarray(counts)[1], strict=True):
            tokens += row[:count].tolist()
        if not filled:
            state, _ = start(config, params, state, 0, SAMPLED[1])
            filled = True
    assert tokens[: SAMPLED[2].max_tokens] == alone.tokens


KINDS = {
    "vanilla": tiny_config(),
    "gated": tiny_config(markov="gated", block=3),
    "rnn": tiny_config(markov="rnn", confidence_threshold=0.45),
    "none": tiny_config(markov="none"),
    "next": tiny_config(draft={"sample_from_anchor": False}),
    "reduced": tiny_config(draft={"draft_vocab_size": 40, "own_head": True}),
    "windowed": tiny_config(
        draft={"layers": tiny_layers(num_layers=2, windows=(0, 5)), "causal": (False, True)}
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_gumbel_verification_says_what_plain_decoding_says(kind: str) -> None:
    """100 prompts, one in four of them greedy; the draws are shared, so the text is too."""
    config = decoding(KINDS[kind], rejection="gumbel")
    params = random_params(config, seed=3, scale=0.3)
    state = plain_state = None
    lengths: list[int] = []
    proposals: set[int] = set()
    for turn in range(25):
        many = [
            Request([turn, 2 * turn % 60], 8, temperature=temperature, seed=turn)
            for temperature in (0.0, 0.6, 1.0, 1.4)
        ]
        drafted, state = run(config, params, many, state=state)
        plain, plain_state = run(plain_config(config), params, many, state=plain_state)
        assert spoken(drafted) == spoken(plain)
        lengths += [n for result in drafted for n in result.acceptance_lengths]
        proposals |= {n for result in drafted for n in result.proposal_lengths}
    assert sum(n > 1 for n in lengths) > 30
    assert (len(proposals) > 2) == (config.decode.confidence_threshold > 0)


def test_a_round_only_adds_rows(agreeing) -> None:
    """True cache rows never change, a finished row never changes, committed = cached + 1."""
    config, params = agreeing
    short = replace(SAMPLED[0], max_tokens=2)
    state = decode.init_state(config, 4)
    prompts = [short, SAMPLED[2]]
    tokens = [list(request.prompt) for request in prompts]
    for slot, request in enumerate(prompts):
        state, first = start(config, params, state, slot, request)
        tokens[slot].append(first)
    for _ in range(8):
        before = jax.tree.map(np.array, state)  # a copy: the state is donated
        state, emitted, counts = one_round(config, params, state)
        for slot in range(2):
            count = int(counts[slot, 0, 0])
            tokens[slot] += np.asarray(emitted)[slot, 0, :count].tolist()
            true_rows = int(before.cached[slot])
            drafted_rows = true_rows - int(before.context_len[slot])
            assert drafted_rows >= len(prompts[slot].prompt), "the next context write starts here"
            for old, new, rows in (
                (before.target, state.target, true_rows),
                (before.draft, state.draft, drafted_rows),
            ):
                for a, b in zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True):
                    np.testing.assert_array_equal(a[slot, :rows], np.asarray(b)[slot, :rows])
            if before.done[slot]:
                assert count == 0
                assert int(state.context_len[slot]) == 0  # the draft has taken what waited
                for name in ("cached", "anchor", "done", "context"):
                    for old, new in zip(
                        jax.tree.leaves(getattr(before, name)),
                        jax.tree.leaves(getattr(state, name)),
                        strict=True,
                    ):
                        np.testing.assert_array_equal(old[slot], np.asarray(new)[slot])
            if not state.done[slot]:
                assert len(tokens[slot]) == int(state.cached[slot]) + 1
                assert int(state.anchor[slot]) == tokens[slot][-1]
    assert bool(state.done[0])
    assert not bool(state.done[1])
