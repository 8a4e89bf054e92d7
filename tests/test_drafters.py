"""Prompt lookup: what it proposes, and that it changes no token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import SamplingParams, load, verify
from dspark_jax.config import NgramConfig
from dspark_jax.decode import init_state
from dspark_jax.drafters import NGRAM, NONE, drafter_of
from dspark_jax.state import ContextRows
from tests.tiny import (
    Request,
    agreeing_params,
    plain_config,
    quick_compilation,
    run,
    run_alone,
    tiny_config,
)

BASE = tiny_config(prefill_chunk=8, max_length=96, confidence_threshold=0.0)
LOOKUP = replace(BASE, draft=NgramConfig(), decode=replace(BASE.decode, num_drafts=5))
PLAIN = plain_config(BASE)


@pytest.fixture(scope="module", autouse=True)
def _quick():
    with quick_compilation():
        yield


@pytest.fixture(scope="module")
def params():
    return {"target": agreeing_params(BASE)["target"]}


def proposal(history: list[int], config: Any = LOOKUP) -> tuple[list[int], int]:
    """Tokens and length proposed after a history whose last token is the anchor."""
    own = NGRAM.init(config, 1)
    rows = ContextRows(tokens=jnp.asarray([[*history, 9, 9]]), features=jnp.zeros((1, 1, 0)))
    cached = jnp.asarray([len(history) - 1])
    own = NGRAM.absorb(config, {}, own, rows, jnp.zeros(1, jnp.int32), cached)
    state = init_state(config, 1).replace(
        draft=own, cached=cached, anchor=jnp.asarray(history[-1:], jnp.int32)
    )
    _, offered = NGRAM.propose(config, {}, state)
    return offered.tokens[0].tolist(), int(offered.length[0])


def test_drafters_are_chosen_by_the_configuration():
    assert drafter_of(LOOKUP) is NGRAM
    assert drafter_of(PLAIN) is NONE


@pytest.mark.parametrize(
    ("history", "tokens", "length"),
    [
        ([1, 2, 3, 4, 5, 6, 7, 1, 2], [3, 4, 5, 6, 7], 5),
        ([1, 2, 3, 8, 2, 3, 4, 7, 7, 2, 3], [4, 7, 7, 2, 3], 5),  # the latest of equal matches
        ([1, 2, 3, 8, 5, 2, 3, 4, 1, 2, 3], [8, 5, 2, 3, 4], 5),  # a longer match before a later
        ([5, 6, 5, 6, 5, 6], [5, 6, 5, 6, 5], 5),  # a match that overlaps the end goes round
        ([4, 4], [4, 4, 4, 4, 4], 5),
        ([1, 2, 3, 4], None, 0),
        ([7], None, 0),
    ],
)
def test_what_is_proposed(history, tokens, length):
    offered, count = proposal(history)
    assert count == length
    if tokens is not None:
        assert offered == tokens


def test_a_match_shorter_than_the_least_proposes_nothing():
    strict = replace(LOOKUP, draft=NgramConfig(max_match=3, min_match=2))
    assert proposal([1, 2, 3, 9, 3], strict)[1] == 0
    assert proposal([2, 3, 1, 9, 2, 3], strict)[1] == 5
    assert proposal([7, 3, 0, 7], strict)[1] == 0  # nothing is before a text, not id 0 either


REQUESTS = [
    Request([1, 2, 3, 4, 1, 2, 3, 4, 1, 2], 40),
    Request(list(range(30, 50)), 30, temperature=0.8, seed=4),
    Request([5] * 9, 40, temperature=1.1, seed=6),
]


@pytest.mark.parametrize("rejection", ["token", "gumbel"])
def test_text_equals_plain_decoding(params, rejection):
    config = replace(LOOKUP, decode=replace(LOOKUP.decode, rejection=rejection))
    results, _ = run(config, params, REQUESTS)
    assert results[0].tokens == run_alone(PLAIN, params, REQUESTS[0]).tokens
    if rejection == "gumbel":
        for result, request in zip(results, REQUESTS, strict=True):
            assert result.tokens == run_alone(PLAIN, params, request).tokens
    for result, request in zip(results, REQUESTS, strict=True):
        assert result == run_alone(config, params, request)


@pytest.mark.parametrize("rejection", ["token", "block"])
def test_lookup_emits_the_target_law_exactly(rejection):
    """Enumeration over where the cut falls, on what lookup proposes and random target laws."""
    vocab, drafts = 5, 3
    base = tiny_config(vocab=vocab, confidence_threshold=0.0, max_length=32)
    config = replace(base, draft=NgramConfig(), decode=replace(base.decode, num_drafts=drafts))
    history = [1, 2, 3, 1, 4, 0, 1]
    rows = ContextRows(tokens=jnp.asarray([history]), features=jnp.zeros((1, 1, 0)))
    cached = jnp.asarray([len(history) - 1])
    own = NGRAM.absorb(config, {}, NGRAM.init(config, 1), rows, jnp.zeros(1, jnp.int32), cached)
    state = init_state(config, 1).replace(draft=own, cached=cached, anchor=jnp.asarray([1]))
    _, offered = NGRAM.propose(config, {}, state)
    laws = jnp.asarray(
        np.random.default_rng(0).dirichlet(np.ones(vocab), (1, drafts + 1)), "float32"
    )
    if rejection == "token":
        passes = np.asarray(verify.token_thresholds(laws, offered))[0]
        cut = [np.prod(passes[:a]) * (1 - passes[a]) for a in range(drafts)] + [np.prod(passes)]
        weights = np.ones(drafts + 1)
    else:
        weights = np.asarray(verify.chain_products(laws, offered))[0]
        passes = np.asarray(verify.block_thresholds(laws, offered, jnp.asarray(weights[None])))[0]
        after = [np.prod(1 - passes[a:]) for a in range(drafts + 1)]  # the last success counts
        cut = [after[0], *(passes[a - 1] * after[a] for a in range(1, drafts + 1))]
    drawn = [
        np.asarray(
            verify.residual_law(laws, offered, jnp.asarray([a]), jnp.asarray(weights[a : a + 1]))
        )[0]
        for a in range(drafts + 1)
    ]
    draft = np.asarray(offered.tokens)[0]
    for slot in range(drafts + 1):  # the token at a slot, given that the drafts before it stand
        emitted = cut[slot] * drawn[slot]
        if slot < drafts:
            emitted[draft[slot]] += sum(cut[slot + 1 :])
        np.testing.assert_allclose(emitted / sum(cut[slot:]), laws[0, slot], atol=1e-6)


def test_text_that_repeats_itself_is_drafted(params):
    """The greedy output of this target runs into a cycle, which lookup finds."""
    result = run_alone(LOOKUP, params, REQUESTS[0])
    assert np.mean(result.acceptance_lengths) > 2


def test_a_threshold_is_refused():
    with pytest.raises(ValueError, match="prompt lookup has no confidence head"):
        replace(LOOKUP, decode=replace(LOOKUP.decode, confidence_threshold=0.5))


def test_load_takes_prompt_lookup_by_name():
    engine = load(draft="ngram", max_length=128, max_batch=1)
    baseline = load(draft=False, max_length=128, max_batch=1)
    prompt, params = [323, 288, 2314, 266, 68, 1021, 76, 652, 325], SamplingParams(max_tokens=60)
    (drafted,) = engine.generate([prompt], params)
    assert drafted.token_ids == baseline.generate([prompt], params)[0].token_ids
    assert set(drafted.proposal_lengths) <= {0, 7}
    assert len(drafted.acceptance_lengths) < 45
    with pytest.raises(ValueError, match="prompt lookup has no file"):
        load(draft="ngram", block_size=4)


def test_possible_acceptance_is_reported_for_every_proposed_draft():
    engine = load(max_length=128, max_batch=1, ceiling=True)
    params = SamplingParams(max_tokens=24, temperature=1.0, seed=1)
    (result,) = engine.generate([[323, 288, 2314, 266]], params)
    assert [len(row) for row in result.possible_acceptance] == result.proposal_lengths
    chances = np.concatenate(result.possible_acceptance)
    assert chances.min() >= 0
    assert chances.max() <= 1 + 1e-5
    assert 0.2 < chances.mean() < 0.95
    greedy = engine.generate([[323, 288, 2314, 266]], SamplingParams(max_tokens=24))[0]
    for row, accepted in zip(greedy.possible_acceptance, greedy.accepted_drafts, strict=True):
        assert row[:accepted] == [1.0] * accepted, "a greedy draft agrees or does not"


def test_prompt_lookup_beats_plain_decoding_on_text_that_repeats():
    prompt = "    self.assertEqual(add(1, 2), 3)\n    self.assertEqual(add(2, 3), 5)\n" * 6
    engines = [load(draft=draft, max_length=512, max_batch=1) for draft in ("ngram", False)]
    params = SamplingParams(max_tokens=200)
    lookup, plain = ([one.generate(prompt, params)[0] for _ in range(4)] for one in engines)
    assert lookup[0].token_ids == plain[0].token_ids
    assert len(lookup[0].acceptance_lengths) < 40
    fastest = [min(result.seconds for result in runs) for runs in (lookup, plain)]
    assert fastest[0] < fastest[1], f"{fastest[0]:.3f} s against {fastest[1]:.3f} s"
