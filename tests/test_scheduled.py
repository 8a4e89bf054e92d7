"""Scheduled rounds: the law of two rows that compete, packed verification, texts that stay."""

from __future__ import annotations

import itertools
import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import decode, rounds, schedule, verify
from dspark_jax.config import ModelConfig
from dspark_jax.packing import WHOLE, pack_rows
from dspark_jax.state import Proposal
from dspark_jax.tiers import BatchCosts
from tests import enumeration, tiny
from tests.test_schedule import global_best
from tests.tiny import Request, decoding, plain_config, tiny_config

VOCAB, BLOCK, ROWS = 3, 3, 2
EXACT = 1e-6
SIZES, COSTS = (4, 6, 8), (1.0, 1.2, 2.0)
SETTINGS = (
    ([1, 2, 0], {"temperature": 1.0}),
    ([2, 2, 1], {"temperature": 1.3, "top_p": 0.9}),
)
# Costs on which a search for the best of all would bias, by verified tokens: the first dear step
# comes after two drafts, or at once.
EVERY_SIZE = tuple(range(2, 9))
LATE = np.array([1, 1, 1, 1.2, 1.3, 1.5, 1.75, 1.76, 1.78])
EARLY = np.array([1, 1, 1, 1.5, 1.53, 1.56, 1.58, 1.6, 1.6])


@pytest.fixture(autouse=True, scope="module")
def compile_quickly():
    with tiny.quick_compilation():
        yield


def pair_config(**decoding: Any) -> ModelConfig:
    return tiny_config(vocab=VOCAB, block=BLOCK, max_length=24, prefill_chunk=4, **decoding)


def scheduled(config: ModelConfig, batch: int = ROWS, **changes: Any) -> ModelConfig:
    table = {"batch": batch, "plain": 1e6, "tokens": SIZES, "rounds": COSTS} | changes
    return decoding(config, costs=(BatchCosts(**table),))


class Competition:
    """Two rows of one batch: every pair of draft paths, its chance, and the laws after it."""

    def __init__(self, rejection: str) -> None:
        self.rejection = rejection
        self.fixed = pair_config(rejection=rejection)
        self.config = scheduled(self.fixed)
        self.params = tiny.random_params(self.fixed, seed=8, scale=0.6)
        state = decode.init_state(self.config, ROWS)
        for slot, (prompt, settings) in enumerate(SETTINGS):
            request = Request(prompt, 12, seed=7, **settings)
            state, _ = tiny.start(self.config, self.params, state, slot, request)
        self.state = state
        self.paths = np.array(list(itertools.product(range(VOCAB), repeat=BLOCK)))
        self.count = len(self.paths)
        self._run_every_path()
        self.pairs = np.array(list(itertools.product(range(self.count), repeat=2)))

    def _run_every_path(self) -> None:
        bare = self.state.replace(gains=())
        tiled = jax.tree.map(lambda x: jnp.repeat(x, self.count, axis=0), bare)
        wished = np.tile(np.eye(VOCAB)[self.paths], (ROWS, 1, 1))
        noise = jnp.asarray(enumeration.CERTAIN * wished, jnp.float32)
        draft = jax.jit(enumeration.forced_draft, static_argnums=0)
        judge = jax.jit(enumeration.forced_verify, static_argnums=0)
        state, proposal = draft(self.fixed, self.params, tiled, noise)
        shape = (ROWS * self.count, BLOCK)
        _, _, laws = judge(
            self.fixed, self.params, state, proposal, jnp.ones(shape), jnp.zeros((shape[0], VOCAB))
        )
        probs = np.take_along_axis(np.asarray(proposal.probs), proposal.tokens[..., None], 2)
        self.chance = probs.astype(np.float64).prod((1, 2)).reshape(ROWS, self.count)
        assert (np.asarray(proposal.tokens) == np.tile(self.paths, (ROWS, 1))).all()
        each = (ROWS, self.count)
        self.laws = np.asarray(laws).reshape(*each, *laws.shape[1:])
        self.proposal = jax.tree.map(lambda x: np.asarray(x).reshape(*each, *x.shape[1:]), proposal)

    def of_pairs(self, tree: Any) -> Any:
        """Arrays [row, path, ...] as [pair, row, ...]."""
        return jax.tree.map(
            lambda x: jnp.stack([x[r][self.pairs[:, r]] for r in range(ROWS)], 1), tree
        )

    def lengths(self, sizes: tuple[int, ...] = SIZES) -> np.ndarray:
        """What the product verifies of each pair [pair, row]."""
        config = scheduled(self.fixed, tokens=sizes, rounds=COSTS[:1] * len(sizes))
        config = self.config if sizes == SIZES else config
        run = jax.jit(
            lambda pairs: jax.lax.map(
                lambda one: rounds.schedule(config, self.state, one)[0].length, pairs
            )
        )
        return np.asarray(run(self.of_pairs(self.proposal)))

    def branches(self, row: int, length: int) -> np.ndarray:
        """Chance [path, accepted, token] of what one round emits when `length` is verified."""
        proposal: Proposal = jax.tree.map(lambda x: x[row], self.proposal)
        proposal = proposal.replace(length=np.full(self.count, length, np.int32))
        proposal = jax.tree.map(jnp.asarray, proposal)
        laws = jnp.asarray(self.laws[row])
        each, weights = enumeration.thresholds(laws, proposal, self.rejection)
        after = enumeration.residuals(laws, proposal, weights)
        return enumeration.length_chances(each, self.rejection)[:, :, None] * after

    def texts(self, branches: np.ndarray, row: int) -> np.ndarray:
        """Law [path, text] of BLOCK + 1 tokens: what a round emits, then the target's own."""
        total = np.zeros((self.count, VOCAB ** (BLOCK + 1)))
        for path, n in itertools.product(range(self.count), range(BLOCK + 1)):
            prefix = path // VOCAB ** (BLOCK - n)
            law = np.zeros(VOCAB ** (n + 1))
            law[prefix * VOCAB : (prefix + 1) * VOCAB] = branches[path, n]
            for k in range(n + 1, BLOCK + 1):
                law = (law[:, None] * self.laws[row, :: VOCAB ** (BLOCK - k), k]).ravel()
            total[path] += law
        return total

    def emitted(self, lengths: np.ndarray) -> np.ndarray:
        """Joint law of both rows' texts."""
        by_length = [
            np.stack([self.texts(self.branches(r, n), r) for n in range(BLOCK + 1)])
            for r in range(ROWS)
        ]
        law = np.zeros((VOCAB ** (BLOCK + 1),) * 2)
        for (i, j), (first, second) in zip(self.pairs, lengths, strict=True):
            chance = self.chance[0, i] * self.chance[1, j]
            law += chance * np.outer(by_length[0][first, i], by_length[1][second, j])
        return law

    def bias(self, lengths: np.ndarray) -> float:
        """Total variation between what is emitted and the target's law."""
        return 0.5 * float(np.abs(self.emitted(lengths) - self.target()).sum())

    def target(self) -> np.ndarray:
        laws = []
        for row in range(ROWS):
            law = np.ones(1)
            for k in range(BLOCK + 1):
                law = (law[:, None] * self.laws[row, :: VOCAB ** (BLOCK - k), k]).ravel()
            laws.append(law)
        return np.outer(*laws)


@pytest.fixture(scope="module", params=["token", "block"])
def competition(request) -> Competition:
    return Competition(request.param)


@pytest.mark.parametrize("curve", [None, LATE], ids=["envelope", "jagged"])
def test_two_rows_that_compete_keep_the_law(competition, curve, monkeypatch) -> None:
    sizes = SIZES
    if curve is not None:
        sizes = EVERY_SIZE
        monkeypatch.setattr(BatchCosts, "envelope", lambda self: curve)
    lengths = competition.lengths(sizes)
    table = lengths.reshape(competition.count, competition.count, ROWS)
    assert len(np.unique(lengths.sum(1))) > 1
    if curve is None:
        assert (table[:, :, 0] != table[:, :1, 0]).any()  # the other row's drafts decide with
    assert competition.bias(lengths) < EXACT


def test_the_enumeration_sees_the_missing_early_stop(competition, monkeypatch) -> None:
    monkeypatch.setattr(BatchCosts, "envelope", lambda self: EARLY)
    assert not competition.lengths(EVERY_SIZE).any()
    monkeypatch.setattr(schedule, "worthwhile", global_best)
    lengths = competition.lengths(EVERY_SIZE)
    assert len(np.unique(lengths)) > 1
    assert competition.bias(lengths) > 100 * EXACT


def test_the_packed_round_emits_what_the_coins_say(competition) -> None:
    """What links the chances to the code: the real verify step, pair by pair."""
    rng = np.random.default_rng(0)
    lengths = competition.lengths()
    branches = np.stack(
        [[competition.branches(r, n) for n in range(BLOCK + 1)] for r in range(ROWS)]
    )
    count = len(competition.pairs)
    outcomes = np.zeros((count, ROWS, 2), int)
    for pair, row in itertools.product(range(count), range(ROWS)):
        chances = branches[row, lengths[pair, row], competition.pairs[pair, row]]
        possible = np.argwhere(chances > 1e-6)
        outcomes[pair, row] = possible[rng.integers(len(possible))]
    accepted, tokens = outcomes[..., 0], outcomes[..., 1]
    coins = np.stack(
        [enumeration.forcing_coins(a, BLOCK, competition.rejection) for a in accepted.T], 1
    )
    noise = enumeration.CERTAIN * np.eye(VOCAB, dtype=np.float32)[tokens]
    output = run_pairs(competition, jnp.asarray(coins), jnp.asarray(noise))
    np.testing.assert_array_equal(output.counts[..., 0], accepted + 1)
    np.testing.assert_array_equal(output.counts[..., 2], lengths)
    for pair, row in itertools.product(range(count), range(ROWS)):
        n, path = accepted[pair, row], competition.paths[competition.pairs[pair, row]]
        expected = [*path[:n], tokens[pair, row]]
        np.testing.assert_array_equal(output.tokens[pair, row, : n + 1], expected)


def run_pairs(competition: Competition, coins: Any, noise: Any) -> Any:
    """`verify_step` on each pair alone, so that each runs the tier that it takes."""

    def one(inputs: Any) -> Any:
        proposal, flips, forced = inputs
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(verify, "coins", lambda *_: flips)
            patch.setattr(verify, "gumbel_noise", lambda *_: forced)
            _, output = decode.verify_step.__wrapped__(
                competition.config, competition.params, competition.state, proposal
            )
        return output

    inputs = (competition.of_pairs(competition.proposal), coins, noise)
    return jax.tree.map(np.asarray, jax.jit(partial(jax.lax.map, one))(inputs))


def test_packed_rows_are_computed_as_in_the_whole_batch() -> None:
    config = tiny_config()
    params = tiny.random_params(config)
    state = decode.init_state(config, 3)
    for slot in range(3):
        request = Request([slot + 1] * (4 + slot), 8)
        state, _ = tiny.start(config, params, state, slot, request)
    verified = jnp.arange(5) <= jnp.array([[0], [4], [2]])
    tokens = jnp.arange(15).reshape(3, 5)
    target = rounds.bind_target(config, params)
    packing = pack_rows(verified, 10)
    whole, packed = (
        target(tokens, state.target, state.cached, (0, 1), "auto", rows)
        for rows in (WHOLE, packing)
    )
    np.testing.assert_allclose(
        packing.unpack(target.logits(packed[0]))[verified],
        target.logits(whole[0])[verified],
        atol=1e-4,
    )
    np.testing.assert_allclose(
        packing.unpack(packed[1])[verified], whole[1][verified], atol=1e-5, rtol=1e-5
    )
    for mine, full in zip(packed[2].k + packed[2].v, whole[2].k + whole[2].v, strict=True):
        for b, (start, count) in enumerate(zip(state.cached, verified.sum(1), strict=True)):
            end = int(start + count)
            np.testing.assert_allclose(mine[b, :end], full[b, :end], atol=1e-5)


REQUESTS = [
    Request([1, 2, 3], 24),
    Request([5, 4], 20, temperature=1.0, seed=3),
    Request([9] * 11, 24, seed=1),
    Request([7, 8, 30, 2], 18, temperature=0.7, top_p=0.9, seed=5),
]


@pytest.mark.parametrize(
    ("plain_cost", "agreeing"), [(1e6, True), (0.4, False)], ids=["drafting", "resting"]
)
def test_texts_equal_plain_decoding_whatever_the_schedule(plain_cost, agreeing) -> None:
    """Greedy rows, and all rows under Gumbel verification."""
    fixed = tiny_config(rejection="gumbel")
    make = tiny.agreeing_params if agreeing else tiny.random_params
    params = make(fixed, seed=3)
    costs = {"plain": plain_cost, "tokens": (8, 12, 20), "rounds": (1.0, 1.1, 1.4)}
    config = scheduled(fixed, batch=4, **costs)
    found, state = tiny.run(config, params, REQUESTS)
    alone = [tiny.run_alone(plain_config(fixed), params, one) for one in REQUESTS]
    assert [one.tokens for one in found] == [one.tokens for one in alone]
    lengths = [n for one in found for n in one.proposal_lengths]
    assert len(set(lengths)) > 2
    if not agreeing:
        assert lengths.count(0) > len(lengths) / 3
        assert int(state.gains.wait) > schedule.FIRST_WAIT


def test_context_waits_through_plain_rounds_and_is_all_absorbed() -> None:
    """After any number of them, of rows that came at different times, the draft sees every row."""
    config = scheduled(tiny_config(), tokens=(4, 10), rounds=(1.0, 1.5))
    params = tiny.random_params(config)
    plain, propose = (
        jax.jit(one, static_argnums=0) for one in (rounds.plain_round, rounds.propose)
    )
    state = decode.init_state(config, ROWS)
    texts = [[1, 2, 3], [7, 8, 9, 4, 5]]
    arrivals, waiting = {0: 0, 3: 1}, []
    for count in range(12):
        if count in arrivals:
            slot = arrivals[count]
            state, first = tiny.start(config, params, state, slot, Request(texts[slot], 40))
            texts[slot].append(first)
        state, output = plain(config, params, state)
        waiting.append(tuple(state.context_len.tolist()))
        for slot in range(1 + (count >= 3)):
            texts[slot] += output.tokens[slot, : output.counts[slot, 0]].tolist()
        if count < 3:
            continue
        _, found = propose(config, params, state)
        fresh = decode.init_state(config, ROWS)
        for slot, text in enumerate(texts):
            fresh, _ = tiny.start(config, params, fresh, slot, Request(text[:-1], 40))
        fresh = fresh.replace(anchor=state.anchor)
        _, expected = propose(config, params, fresh)
        np.testing.assert_array_equal(found.tokens, expected.tokens)
        np.testing.assert_allclose(found.probs, expected.probs, atol=1e-5)
        np.testing.assert_allclose(found.confidence, expected.confidence, atol=1e-4)
    block = config.decode.step_rows
    assert waiting[:7] == [(1, 0), (2, 0), (3, 0), (4, 1), (5, 2), (1, 1), (2, 2)]
    assert max(max(pair) for pair in waiting) == block


def test_greedy_rows_of_a_mixed_batch_equal_plain_decoding() -> None:
    fixed = tiny_config(rejection="block")
    params = tiny.agreeing_params(fixed, seed=5)
    config = scheduled(fixed, batch=4, plain=0.6, tokens=(8, 20), rounds=(1.0, 1.5))
    found, _ = tiny.run(config, params, REQUESTS)
    for one, request in zip(found, REQUESTS, strict=True):
        if request.temperature == 0:
            assert one.tokens == tiny.run_alone(plain_config(fixed), params, request).tokens


def test_a_round_in_two_steps_is_the_round() -> None:
    config = scheduled(tiny_config(), tokens=(4, 10), rounds=(1.0, 1.5))
    params = tiny.agreeing_params(config)

    def started() -> Any:
        state = decode.init_state(config, ROWS)
        for slot in range(ROWS):
            state, _ = tiny.start(config, params, state, slot, Request([slot + 1, 5], 40))
        return state

    whole, halves = started(), started()
    for _ in range(4):
        whole, expected = decode.decode_round(config, params, whole)
        halves, proposal = decode.draft_step(config, params, halves)
        halves, found = decode.verify_step(config, params, halves, proposal)
        np.testing.assert_array_equal(found.tokens, expected.tokens)
        np.testing.assert_array_equal(found.counts, expected.counts)
        jax.tree.map(np.testing.assert_array_equal, halves.gains, whole.gains)
    assert (whole.gains.rounds == 4).all()


def test_what_is_chosen_among_copies_no_cache() -> None:
    """Also where XLA copies all that passes through a conditional (CPU, before jax 0.11)."""
    config = scheduled(tiny_config(), batch=3, tokens=(6, 10, 15), rounds=(1.0, 1.3, 1.5))
    state = decode.init_state(config, 3)
    arguments = config, tiny.random_params(config), state, jnp.int32(4)
    program = decode.decode_rounds.lower(*arguments).compile().as_text()
    for cache in {x.shape for x in (*state.target.k, *state.draft.k)}:
        shape = ",".join(map(str, cache))
        assert f"f32[{shape}]" in program
        assert not re.search(rf"= f32\[{shape}\]\S* copy\(", program)


def test_calibration_acts_on_what_is_verified() -> None:
    config = scheduled(tiny_config(), batch=1, tokens=(2, 5), rounds=(1.0, 1.6))
    state = decode.init_state(config, 1).replace(done=jnp.array([False]))
    sure = Proposal(
        tokens=jnp.zeros((1, 4), jnp.int32),
        length=jnp.array([4]),
        probs=jnp.zeros((1, 4, 0)),
        confidence=jnp.full((1, 4), 3.0),
    )
    for temperatures, length in (((), 4), ((300.0,) * 4, 1)):
        own = decoding(config, temperatures=temperatures)
        assert rounds.schedule(own, state, sure)[0].length.tolist() == [length]


def test_a_round_drafts_where_it_pays_or_where_it_has_waited() -> None:
    """Rows that have ended do not count; the price of a drafted round is that of its tier."""
    config = scheduled(tiny_config(), plain=2.0, tokens=(4, 10), rounds=(1.0, 99.0))
    params = tiny.random_params(config)
    run = jax.jit(rounds.run_round, static_argnums=0)
    state = decode.init_state(config, ROWS)
    for slot in range(ROWS):
        state, _ = tiny.start(config, params, state, slot, Request([slot], 8))

    def after(mean: float, idle: int, ended: bool = False) -> Any:
        gains = schedule.init_gains(ROWS).replace(
            rounds=jnp.full(ROWS, schedule.MEMORY),
            tokens=jnp.array([mean, 9.0]),
            price=jnp.float32(6),
            idle=jnp.int32(idle),
            wait=jnp.int32(5),
        )
        done = jnp.array([False, ended])
        return run(config, params, state.replace(gains=gains, done=done))[0].gains

    assert [int(after(*row).idle) for row in ((4, 0), (1, 4), (1, 5))] == [0, 5, 0]
    assert int(after(4, 0, ended=True).idle) == 1
    fresh = run(config, params, state)[0].gains
    assert (float(fresh.price), fresh.rounds.tolist()) == (0.5, [1, 1])


def test_a_new_row_knows_nothing_of_the_gains_of_the_last() -> None:
    config = scheduled(tiny_config(), tokens=(4, 10), rounds=(1.0, 1.5))
    state = decode.init_state(config, ROWS)
    state = state.replace(gains=state.gains.replace(rounds=jnp.full(ROWS, 9, jnp.int32)))
    state = decode.admit(config, state, jnp.int32(1), Request([1], 4).settings())
    assert state.gains.rounds.tolist() == [9, 0]


def test_a_batch_without_costs_is_refused_with_the_remedy() -> None:
    config = scheduled(tiny_config(), batch=4, tokens=(8, 20), rounds=(1.0, 1.5))
    state = decode.init_state(config, 3)
    with pytest.raises(ValueError, match=r"no batch of 3 rows.*profile_costs"):
        decode.decode_round(config, tiny.random_params(config), state)
