"""The float64 oracles agree with transformers and with each other."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tests import oracles

VOCAB, BLOCK = 4, 3
RULES = {"token": oracles.judge_tokens, "block": oracles.judge_block}


def random_laws(seed: int, sparse: bool = False):
    """A law after every text, made on demand; sparse ones have zeros."""
    rng = np.random.default_rng(seed)
    known: dict[tuple[int, ...], np.ndarray] = {}

    def after(text: tuple[int, ...]) -> np.ndarray:
        if text not in known:
            law = rng.dirichlet(np.ones(VOCAB))
            if sparse:
                law[rng.permutation(VOCAB)[: rng.integers(1, VOCAB)]] = 0
            known[text] = law / law.sum()
        return known[text]

    return after


@pytest.mark.parametrize("seed", range(8))
def test_sampling_law_is_transformers(seed: int) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=11) * 3
    temperature, top_k = rng.uniform(0.3, 2), int(rng.integers(1, 13))
    top_p, min_p = rng.uniform(0.05, 0.99), rng.uniform(0, 0.5)
    scores = torch.tensor(logits)[None]
    for warper in (
        TemperatureLogitsWarper(float(temperature)),
        TopKLogitsWarper(top_k),
        TopPLogitsWarper(float(top_p)),
        MinPLogitsWarper(float(min_p)),
    ):
        scores = warper(torch.zeros(1, 0, dtype=torch.long), scores)
    expected = torch.softmax(scores, -1)[0].numpy()
    law = oracles.sampling_law(logits, temperature, top_k, top_p, min_p)
    np.testing.assert_allclose(law, expected, atol=1e-12)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("rule", ["token", "block", "gumbel"])
def test_each_rule_emits_the_target_law_over_rounds(rule: str, sparse: bool) -> None:
    draft, target = random_laws(1, sparse), random_laws(2, sparse)

    def one_round(text):
        def draft_after(prefix):
            return draft(text + prefix)

        def target_after(prefix):
            return target(text + prefix)

        if rule == "gumbel":
            return oracles.gumbel_outcomes(draft_after, target_after, BLOCK)
        return oracles.round_outcomes(RULES[rule], draft_after, target_after, BLOCK)

    law = oracles.emitted_law(one_round, VOCAB, 3)
    np.testing.assert_allclose(law, oracles.text_law(target, VOCAB, 3), atol=1e-12)


def test_a_wrong_residual_is_seen() -> None:
    draft, target = random_laws(3), random_laws(4)

    def no_residual(drafts, draft_laws, target_laws):
        return oracles.judge_tokens(drafts, draft_laws, target_laws)[0], list(target_laws)

    outcomes = oracles.round_outcomes(no_residual, draft, target, BLOCK)
    law = sum(chance for text, chance in outcomes.items() if text[0] == 0)
    assert abs(law - target(())[0]) > 1e-3


@pytest.mark.parametrize("seed", range(5))
def test_blocks_accept_no_less_than_tokens(seed: int) -> None:
    draft, target = random_laws(10 + seed), random_laws(20 + seed)
    mean = {
        name: sum(
            len(text) * chance
            for text, chance in oracles.round_outcomes(rule, draft, target, BLOCK).items()
        )
        for name, rule in RULES.items()
    }
    assert mean["block"] >= mean["token"]


@pytest.mark.parametrize("sparse", [False, True])
def test_gumbel_joint_law(sparse: bool) -> None:
    draft, target = random_laws(5, sparse)(()), random_laws(6, sparse)(())
    joint = oracles.gumbel_joint(draft, target)
    np.testing.assert_allclose(joint.sum(1), draft, atol=1e-12)
    np.testing.assert_allclose(joint.sum(0), target, atol=1e-12)
    distance = np.abs(draft - target).sum() / 2
    assert joint.trace() >= (1 - distance) / (1 + distance) - 1e-12
    noise = np.random.default_rng(0).gumbel(size=(200_000, VOCAB))
    with np.errstate(divide="ignore"):
        pairs = zip(
            (np.log(draft) + noise).argmax(1), (np.log(target) + noise).argmax(1), strict=True
        )
    counts = np.zeros((VOCAB, VOCAB))
    np.add.at(counts, tuple(np.array(list(pairs)).T), 1)
    for a, b in itertools.product(range(VOCAB), repeat=2):
        spread = np.sqrt(joint[a, b] * (1 - joint[a, b]) / len(noise))
        assert abs(counts[a, b] / len(noise) - joint[a, b]) < 5 * spread + 1e-6


def test_rotation_keeps_lengths_and_depends_on_distance_only() -> None:
    class Rope:
        kind, theta, attention_factor = "default", 100.0, 1.0

    rng = np.random.default_rng(0)
    query, key = rng.normal(size=(2, 1, 1, 8))
    scores = [
        np.vdot(
            oracles.rotate(query, np.array([p + 3]), Rope()),
            oracles.rotate(key, np.array([p]), Rope()),
        )
        for p in (0, 5, 100)
    ]
    np.testing.assert_allclose(scores, scores[0], atol=1e-12)
    turned = oracles.rotate(query, np.array([7]), Rope())
    np.testing.assert_allclose(np.linalg.norm(turned), np.linalg.norm(query), atol=1e-12)
    assert not np.allclose(turned, query)


def test_attention_reads_only_visible_rows() -> None:
    rng = np.random.default_rng(0)
    query, key, value = rng.normal(size=(3, 4, 2, 6))
    visible = np.tril(np.ones((4, 4), bool))
    out = oracles.attention(query, key, value, visible)
    key[3], value[3] = 1e6, -1e6
    np.testing.assert_array_equal(oracles.attention(query, key, value, visible)[:3], out[:3])
    np.testing.assert_allclose(out[0], value[0], atol=1e-12)
