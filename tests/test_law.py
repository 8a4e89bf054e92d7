"""The emitted law is the target's, shown by exact enumeration and without statistics."""

from __future__ import annotations

import itertools
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import decode, sampling, verify
from dspark_jax.config import ModelConfig
from dspark_jax.state import Proposal
from tests import enumeration, oracles, tiny
from tests.enumeration import Enumeration, Programs
from tests.tiny import Request, decoding, tiny_config

VOCAB, BLOCK = 4, 3
EXACT = 1e-6
TRUNCATIONS = (
    {"temperature": 1.0},
    {"temperature": 1.5, "top_k": 2},
    {"temperature": 1.2, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.1},
)
HEADS = ("vanilla", "gated", "rnn", "none")


@pytest.fixture(autouse=True, scope="module")
def compile_quickly():
    with tiny.quick_compilation():
        yield


def law_config(head: str, reduced: bool = False, **settings: Any) -> ModelConfig:
    changes = {"draft_vocab_size": VOCAB - 1, "own_head": True} if reduced else {}
    return tiny_config(
        vocab=VOCAB,
        block=BLOCK,
        markov=head,
        draft=changes,
        max_length=24,
        prefill_chunk=4,
        **settings,
    )


BASE = law_config("vanilla")  # what the target's half of a round needs is the same for all drafts


@cache
def draft_program(config: ModelConfig) -> Any:
    return partial(jax.jit(enumeration.forced_draft, static_argnums=0), config)


@cache
def verify_program(rejection: str) -> Any:
    config = decoding(BASE, rejection=rejection)
    return partial(jax.jit(enumeration.forced_verify, static_argnums=0), config)


def start_rows(params: Any) -> Any:
    """One running row for each truncation, after the same prompt."""
    backbone = ("fc", "hidden_norm", "context_kv", "layers", "norm")
    shared = {name: params["draft"][name] for name in backbone}
    params = params | {"draft": tiny.random_params(BASE)["draft"] | shared}
    state = decode.init_state(BASE, len(TRUNCATIONS))
    for slot, settings in enumerate(TRUNCATIONS):
        request = Request([1, 3, 0], 12, seed=7, **settings)
        state, _ = tiny.start(BASE, params, state, slot, request)
    return state


CASES = {
    f"{head}-{'reduced' if reduced else 'full'}-{'top_k' if top_k else 'all'}": law_config(
        head, reduced, draft_top_k=top_k
    )
    for head, reduced, top_k in itertools.product(HEADS, (False, True), (0, 2))
} | {
    "vanilla-truncated": law_config("vanilla", draft_truncation=True),
    "rnn-reduced-truncated": law_config("rnn", True, draft_truncation=True),
    "vanilla-greedy": law_config("vanilla", draft_sampling="greedy"),
    "gated-threshold": law_config("gated", confidence_threshold=0.5),
}


def programs_of(config: ModelConfig, params: Any, rejection: str) -> Programs:
    return Programs(
        draft=partial(draft_program(config), params),
        verify=partial(verify_program(rejection), {"target": params["target"]}),
        rejection=rejection,
        vocab=VOCAB,
        drafts=BLOCK,
    )


@pytest.mark.parametrize("rejection", ["token", "block"])
@pytest.mark.parametrize("case", CASES)
def test_three_rounds_in_a_row_emit_the_target_law(case: str, rejection: str) -> None:
    config = CASES[case]
    params = tiny.random_params(config, seed=2, scale=0.35)
    walk = Enumeration(programs_of(config, params, rejection), length=3)
    emitted, target = walk.run(start_rows(params), len(TRUNCATIONS))
    assert walk.rounds == 3
    assert len(walk.lengths) > 1 or not config.decode.confidence_threshold
    np.testing.assert_allclose(target.reshape(len(target), -1).sum(1), 1, atol=EXACT)
    np.testing.assert_allclose(emitted, target, atol=EXACT)


@pytest.mark.parametrize("rejection", ["token", "block"])
def test_the_enumeration_sees_a_wrong_residual(rejection: str, monkeypatch) -> None:
    def unweighted(laws: Any, proposal: Proposal, accepted: Any, weight: Any) -> Any:
        return laws[jnp.arange(len(laws)), accepted]

    params = tiny.random_params(BASE, seed=2, scale=0.35)
    walk = Enumeration(programs_of(BASE, params, rejection), length=1)
    emitted, target = walk.run(start_rows(params), len(TRUNCATIONS))
    np.testing.assert_allclose(emitted, target, atol=EXACT)
    monkeypatch.setattr(verify, "residual_law", unweighted)
    wrong, _ = walk.run(start_rows(params), len(TRUNCATIONS))
    assert np.abs(wrong - target).max() > 1e-3


@pytest.mark.parametrize("case", CASES)
def test_drafts_are_drawn_from_the_law_that_is_published(case: str) -> None:
    config = CASES[case]
    params = tiny.random_params(config, seed=2, scale=0.35)
    batch = enumeration.HISTORIES * VOCAB**BLOCK
    one = start_rows(params)
    state = jax.tree.map(
        lambda x: jnp.tile(x, (batch // len(TRUNCATIONS),) + (1,) * (x.ndim - 1)), one
    )
    noise = np.random.default_rng(0).gumbel(size=(batch, BLOCK, VOCAB)).astype(np.float32)
    _, proposal = draft_program(config)(params, state, jnp.asarray(noise))
    probs = np.asarray(proposal.probs)
    np.testing.assert_allclose(probs.sum(-1), 1, atol=EXACT)
    with np.errstate(divide="ignore"):
        best = (np.log(probs) + noise).argmax(-1)
    np.testing.assert_array_equal(np.asarray(proposal.tokens), best)
    assert len(np.unique(np.asarray(proposal.tokens))) > 1


JUDGED_VOCAB = 5
LAWS = ("random", "sparse", "disjoint", "equal", "certain draft", "certain target")


class JudgedPaths:
    """Laws after every prefix, and a proposal for each path of drafts; cut by prefix or whole."""

    def __init__(self, kind: str, cut: bool, seed: int = 0) -> None:
        rng, vocab = np.random.default_rng(seed), JUDGED_VOCAB
        sizes = [vocab**k for k in range(BLOCK + 1)]
        draft = [rng.dirichlet(np.ones(vocab), size) for size in sizes]
        target = [rng.dirichlet(np.ones(vocab), size) for size in sizes]
        if kind == "sparse":
            draft, target = ([self.thin(x, rng) for x in side] for side in (draft, target))
        elif kind == "disjoint":
            draft, target = (
                [self.only(x, i) for x in side] for i, side in enumerate((draft, target))
            )
        elif kind == "equal":
            draft = target
        elif kind.startswith("certain"):
            sharp = [np.eye(vocab)[rng.integers(vocab, size=size)] for size in sizes]
            draft, target = (sharp, target) if kind == "certain draft" else (draft, sharp)
        self.target = target
        self.paths = np.array(list(itertools.product(range(vocab), repeat=BLOCK)))
        codes = [np.arange(vocab**BLOCK) // vocab ** (BLOCK - k) for k in range(BLOCK + 1)]
        rows = [
            np.stack([side[k][codes[k]] for k in range(BLOCK + 1)], 1) for side in (draft, target)
        ]
        self.draft_laws, self.target_laws = rows[0][:, :BLOCK], rows[1]
        stops = np.stack([(rng.random(sizes[k]) < 0.3)[codes[k]] for k in range(BLOCK)], 1) & cut
        self.lengths = np.where(stops.any(1), stops.argmax(1), BLOCK)
        self.laws = jnp.asarray(self.target_laws, jnp.float32)
        self.proposal = Proposal(
            tokens=jnp.asarray(self.paths, jnp.int32),
            length=jnp.asarray(self.lengths, jnp.int32),
            probs=jnp.asarray(self.draft_laws, jnp.float32),
            confidence=jnp.zeros((len(self.paths), 0)),
        )

    @staticmethod
    def thin(laws: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        kept = rng.random(laws.shape) < 0.5
        kept[np.arange(len(laws)), rng.integers(laws.shape[1], size=len(laws))] = True
        return laws * kept / (laws * kept).sum(1, keepdims=True)

    @staticmethod
    def only(laws: np.ndarray, parity: int) -> np.ndarray:
        kept = laws * (np.arange(laws.shape[1]) % 2 == parity)
        return kept / kept.sum(1, keepdims=True)

    def path_chance(self) -> np.ndarray:
        return np.take_along_axis(self.draft_laws, self.paths[:, :, None], 2)[:, :, 0].prod(1)


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("kind", LAWS)
@pytest.mark.parametrize("rejection", ["token", "block"])
def test_judgement_is_the_rule_of_the_paper(rejection: str, kind: str, cut: bool) -> None:
    """Chances of each accepted length and residual laws against float64, and the law they emit."""
    judged = JudgedPaths(kind, cut)
    each, weights = enumeration.thresholds(judged.laws, judged.proposal, rejection)
    lengths = enumeration.length_chances(each, rejection)
    follow = enumeration.residuals(judged.laws, judged.proposal, weights)
    rule = oracles.judge_tokens if rejection == "token" else oracles.judge_block
    for b in np.flatnonzero(judged.path_chance()):
        n = judged.lengths[b]
        chances, laws = rule(
            judged.paths[b, :n], judged.draft_laws[b, :n], judged.target_laws[b, : n + 1]
        )
        np.testing.assert_allclose(lengths[b, : n + 1], chances, atol=EXACT)
        np.testing.assert_array_equal(lengths[b, n + 1 :], 0)
        for k in np.flatnonzero(chances > 1e-5):
            np.testing.assert_allclose(chances[k] * follow[b, k], chances[k] * laws[k], atol=EXACT)
    branches = (judged.path_chance()[:, None] * lengths)[:, :, None] * follow
    np.testing.assert_allclose(
        emitted_by_one_round(branches, judged.target),
        emitted_by_one_round(None, judged.target),
        atol=EXACT,
    )


def emitted_by_one_round(branches: np.ndarray | None, target: list[np.ndarray]) -> np.ndarray:
    """Law of BLOCK + 1 tokens: one round's branches, then the target; None is the target alone."""
    vocab = JUDGED_VOCAB
    total = np.zeros(vocab ** (BLOCK + 1))
    for n in range(BLOCK + 1):
        if branches is None:
            head = target[0].ravel() if n == 0 else np.zeros(vocab ** (n + 1))
        else:
            head = branches[:, n].reshape(vocab**n, -1, vocab).sum(1).ravel()
        for k in range(n + 1, BLOCK + 1):
            head = (head[:, None] * target[k]).ravel()
        total += head
    return total


@pytest.mark.parametrize("kind", LAWS)
@pytest.mark.parametrize("rejection", ["token", "block"])
def test_coins_below_a_threshold_pass_and_no_others(rejection: str, kind: str) -> None:
    """What links the chances to the code: `judge` follows the thresholds, coin by coin."""
    judged = JudgedPaths(kind, cut=True)
    each, weights = enumeration.thresholds(judged.laws, judged.proposal, rejection)
    follow = enumeration.residuals(judged.laws, judged.proposal, weights)
    rng = np.random.default_rng(1)
    single = each.astype(np.float32)
    trials = [rng.random(each.shape, np.float32) for _ in range(5)]
    trials += [single, np.nextafter(single, np.float32(0)), np.zeros_like(single)]
    for flips in trials:
        passed = flips < single
        if rejection == "token":
            expected = np.cumprod(passed, 1).sum(1)
        else:
            expected = np.where(passed, np.arange(1, BLOCK + 1), 0).max(1)
        accepted, law = verify.judge(judged.laws, judged.proposal, jnp.asarray(flips), rejection)
        np.testing.assert_array_equal(np.asarray(accepted), expected)
        np.testing.assert_allclose(law, follow[np.arange(len(law)), expected], atol=EXACT)


def test_gumbel_draws_agree_as_often_as_they_can() -> None:
    """The product's draws of two laws with one noise follow their exact joint law."""
    rng = np.random.default_rng(3)
    count, laws = 100_000, rng.dirichlet(np.ones(JUDGED_VOCAB), 2)
    settings = sampling.Sampling(
        *(jnp.zeros(count) for _ in range(4)), seed=jnp.zeros((count, 2), jnp.uint32)
    )
    keys = sampling.stream_keys(settings, sampling.Stream.TARGET, jnp.arange(count))
    noise = sampling.gumbel_noise(keys, JUDGED_VOCAB)
    draws = [np.asarray(sampling.draw(jnp.asarray(law, jnp.float32), noise)) for law in laws]
    counts = np.zeros((JUDGED_VOCAB, JUDGED_VOCAB))
    np.add.at(counts, tuple(draws), 1)
    joint = oracles.gumbel_joint(*laws)
    spread = np.sqrt(joint * (1 - joint) / count)
    assert (np.abs(counts / count - joint) < 5 * spread + 1e-6).all()
