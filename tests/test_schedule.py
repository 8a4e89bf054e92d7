"""Algorithm 1 against a loop in float64, its early stop, the tiers, and when a round drafts."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import schedule
from dspark_jax.decoding import DecodeConfig
from dspark_jax.draft import proposal_length
from dspark_jax.packing import pack_rows
from dspark_jax.tiers import BatchCosts, costs_of, verified_tiers
from tests.oracles import algorithm_1


def global_best(ordered, running, curve):
    """What Algorithm 1 would take without its early stop: a variant of the tests alone."""
    counts = running + jnp.arange(ordered.size + 1)
    expected = running + jnp.cumsum(jnp.pad(jnp.maximum(ordered, 0.0), (1, 0)))
    rate = jnp.where(counts < curve.size, expected / curve[counts % curve.size], 0.0)
    return jnp.argmax(rate).astype(jnp.int32)


def appendix_marginal() -> np.ndarray:
    """The emitted law of the first token in the paper's appendix A: drafts A or B, then judged."""
    curve = 1 / jnp.array([1.0, 1.0, 0.5, 0.45])
    target, draft = np.array([0.7, 0.3]), np.array([0.5, 0.5])
    emitted = np.zeros(2)
    for token, second in enumerate((0.9, 0.0)):
        alive = schedule.survival(jnp.array([[0.8, second]]))
        tiers = (1, 2, 3)
        tier = schedule.choose_tier(alive, jnp.array([True]), curve, tiers, jnp.arange(3.0))
        length = int(schedule.fill_tier(alive, jnp.array([True]), tiers[int(tier)])[0])
        assert length == int(tier)
        if length == 0:
            emitted += draft[token] * target
            continue
        accepted = min(1.0, target[token] / draft[token])
        residual = np.maximum(target - draft, 0) / np.maximum(target - draft, 0).sum()
        emitted[token] += draft[token] * accepted
        emitted += draft[token] * (1 - accepted) * residual
    return emitted


def test_the_papers_example_keeps_the_law_by_the_early_stop(monkeypatch) -> None:
    np.testing.assert_allclose(appendix_marginal(), [0.7, 0.3], atol=1e-12)
    monkeypatch.setattr(schedule, "worthwhile", global_best)
    np.testing.assert_allclose(appendix_marginal(), [0.85, 0.15], atol=1e-12)


def random_case(seed: int):
    rng = np.random.default_rng(seed)
    batch, drafts = (4, 5) if seed % 3 else (1, 7)
    levels = [0.0, 0.25, 0.5, 1.0] if seed % 2 else rng.random(40)
    alive = np.cumprod(rng.choice(levels, (batch, drafts)), axis=1).astype(np.float32)
    active = rng.random(batch) < 0.8
    active[int(rng.integers(batch))] = True
    most = batch * (drafts + 1)
    curve = (1 + np.cumsum(rng.random(most + 1) * rng.choice([0.02, 0.2, 1.0]))).astype(np.float32)
    tiers = sorted({most} | {int(rng.integers(batch, most + 1)) for _ in range(2)})
    return alive, active, curve, tuple(tiers)


def choose_lengths(alive, active, curve, tiers):
    alive, active = jnp.asarray(alive), jnp.asarray(active)
    rising = jnp.arange(1.0, len(tiers) + 1)
    tier = schedule.choose_tier(alive, active, jnp.asarray(curve), tiers, rising)
    return schedule.fill_tier(alive, active, tiers[int(tier)]), tier


@pytest.mark.parametrize("seed", range(40))
def test_lengths_are_those_of_the_loop_in_the_paper(seed: int) -> None:
    alive, active, curve, tiers = random_case(seed)
    lengths, tier = choose_lengths(alive, active, curve, tiers)
    expected, size = algorithm_1(alive, active, curve, tiers)
    np.testing.assert_array_equal(lengths, expected)
    assert tiers[int(tier)] == size
    assert int(np.sum(np.asarray(lengths) + active)) <= size


def test_a_larger_tier_that_costs_less_is_taken() -> None:
    alive, active = jnp.full((2, 3), 0.9), jnp.ones(2, bool)
    curve = jnp.array([1.0, 1, 1, 1, 9, 9, 9, 9, 9])  # one draft is worth it
    for costs, tier in (
        ((1.0, 2, 3), 1),
        ((1.0, 3, 2), 2),
        ((0.5, 2, 2), 1),
        ((4.0, 2, jnp.inf), 1),
    ):
        chosen = schedule.choose_tier(alive, active, curve, (2, 4, 8), jnp.asarray(costs))
        assert chosen == tier, costs


@pytest.mark.parametrize("seed", range(8))
def test_what_comes_after_a_draft_does_not_decide_about_it(seed: int) -> None:
    """The lossless property: redraw all that is below a draft, and it stays in or out."""
    rng = np.random.default_rng(seed)
    _, _, curve, tiers = random_case(3 * seed + 1)
    alive = np.cumprod(rng.random((4, 5)), axis=1).astype(np.float32)
    active = np.ones(4, bool)

    def taken(survivals: np.ndarray) -> np.ndarray:
        lengths, _ = choose_lengths(survivals, active, curve, tiers)
        return np.arange(5) < np.asarray(lengths)[:, None]

    whole = taken(alive)
    for least in np.sort(alive.ravel())[1:]:
        redrawn = np.where(alive < least, 0, alive)
        factors = rng.random(alive.shape)
        for j in range(5):
            before = redrawn[:, j - 1] if j else np.ones(4)
            lower = np.minimum(before, least) * factors[:, j]
            redrawn[:, j] = np.where(alive[:, j] < least, lower, alive[:, j])
        assert (redrawn[alive < least] < least).all()
        np.testing.assert_array_equal(taken(redrawn)[alive >= least], whole[alive >= least])


def test_confidences_are_calibrated_by_position() -> None:
    logits = jnp.array([[2.0, 2.0, -1.0]])
    np.testing.assert_allclose(schedule.confidences(logits), jax.nn.sigmoid(logits))
    scaled = schedule.confidences(logits, (1.0, 2.0, 0.5, 9.0))
    np.testing.assert_allclose(scaled, 1 / (1 + np.exp([[-2.0, -1.0, 2.0]])), rtol=1e-6)
    np.testing.assert_allclose(schedule.survival(scaled)[0, 2], np.prod(scaled), rtol=1e-6)


def test_a_threshold_is_of_calibrated_confidences() -> None:
    settings = DecodeConfig(
        max_length=8, num_drafts=3, confidence_threshold=0.5, temperatures=(1.0, 2.0, 0.25)
    )
    logits = jnp.array([[1.0, 0.0, -1.0], [4.0, 4.0, 4.0], [-1.0, 4.0, 4.0]])
    assert proposal_length(logits, (3, 3), settings).tolist() == [2, 3, 0]
    high = replace(settings, confidence_threshold=0.7)
    assert proposal_length(jnp.array([[1.0, 1.0, 9.0]]), (1, 3), high).tolist() == [1]


def test_the_envelope_is_the_largest_convex_curve_below_the_tiers() -> None:
    costs = BatchCosts(2, 1.0, (4, 8, 16, 32), (2.0, 3.5, 4.0, 8.0))
    curve = costs.envelope()
    assert curve.shape == (33,)
    np.testing.assert_array_equal(curve[:5], 2.0)
    np.testing.assert_allclose(curve[[4, 16, 32]], [2.0, 4.0, 8.0])
    assert curve[8] < 3.5
    assert (np.diff(curve, 2) >= -1e-12).all()
    falling = BatchCosts(1, 1.0, (2, 4, 8), (3.0, 2.5, 5.0)).envelope()
    assert (np.diff(falling, 2) >= -1e-12).all()
    np.testing.assert_allclose(falling[[4, 8]], [2.5, 5.0])


def test_tiers_that_save_nothing_are_dropped() -> None:
    assert verified_tiers(64, 8) == (128, 256, 384, 512)
    assert verified_tiers(1, 8) == (2, 4, 6, 8)
    assert verified_tiers(3, 3) == (7, 9)
    flat = BatchCosts(8, 4.7, (16, 32, 64), (5.70, 5.72, 5.74))
    assert flat.pruned().tokens == (64,)
    steep = BatchCosts(64, 7.0, (128, 256, 512), (8.0, 10.0, 16.0))
    assert steep.pruned() == steep
    assert BatchCosts(8, 1.0, (16, 32, 64), (2.0, 2.01, 3.0)).pruned().tokens == (32, 64)
    assert costs_of((flat, steep), 64, True) is steep
    greedy, sampled = (replace(steep, sampled=one) for one in (False, True))
    assert costs_of((greedy, sampled), 64, True) is sampled
    assert costs_of((sampled, greedy), 64, False) is greedy
    with pytest.raises(ValueError, match=r"no batch of 5 rows.*profile_costs"):
        costs_of((flat, steep), 5, True)


@pytest.mark.parametrize(
    "wrong",
    [
        {"batch": 0},
        {"tokens": ()},
        {"tokens": (8, 4)},
        {"tokens": (1, 4)},
        {"plain": 0.0},
        {"rounds": (1.0,)},
        {"rounds": (1.0, float("nan"))},
    ],
)
def test_costs_that_cannot_be(wrong) -> None:
    right = {"batch": 2, "plain": 1.0, "tokens": (4, 8), "rounds": (1.0, 2.0)}
    with pytest.raises(ValueError, match=r"costs need|must"):
        BatchCosts(**(right | wrong))


@pytest.mark.parametrize("seed", range(10))
def test_packed_rows_come_back_where_they_were(seed: int) -> None:
    rng = np.random.default_rng(seed)
    verified = rng.random((4, 5)) < 0.5
    size = int(verified.sum()) + int(rng.integers(0, 4))
    x = jnp.asarray(rng.normal(size=(4, 5, 3)))
    packing = pack_rows(jnp.asarray(verified), max(size, 1))
    packed = packing.pack(x)
    assert packed.shape == (max(size, 1), 3)
    np.testing.assert_array_equal(packing.unpack(packed)[verified], x[verified])


class Trials:
    """Rounds of one batch that emit what they are told; counts which of them drafted."""

    def __init__(self, batch: int, plain: float, cost: float) -> None:
        self.gains, self.price = schedule.init_gains(batch), cost / plain
        self.active = jnp.ones(batch, bool)

    def run(self, emitted: list[int], rounds: int) -> int:
        drafted = 0
        for _ in range(rounds):
            paid = schedule.pays(self.gains, self.active)
            if schedule.due(self.gains, self.active):
                drafted += 1
                self.gains = schedule.after_drafting(
                    self.gains, jnp.array(emitted), self.active, jnp.float32(self.price), paid
                )
            else:
                self.gains = self.gains.replace(idle=self.gains.idle + 1)
        return drafted


def test_drafting_rests_where_it_does_not_pay_and_comes_back() -> None:
    trials = Trials(2, plain=1.0, cost=2.0)
    assert trials.run([1, 2], 40) < 15  # 1.5 tokens for twice the cost
    trials.run([1, 2], 150)
    assert trials.run([1, 2], 640) <= 10  # a trial now and then
    assert int(trials.gains.wait) == 100  # at twice the cost a trial in 100 rounds is 1 %
    trials.run([8, 8], 400)
    assert trials.run([8, 8], 50) == 50
    assert int(trials.gains.wait) == schedule.FIRST_WAIT


@pytest.mark.parametrize(("cost", "wait"), [(0.9, schedule.FIRST_WAIT), (1.25, 25), (3.0, 200)])
def test_trials_of_the_same_rows_take_a_hundredth_of_the_time(cost: float, wait: int) -> None:
    trials = Trials(2, plain=1.0, cost=cost)
    trials.run([0, 0], 1500)
    assert int(trials.gains.wait) == wait
    drafted = trials.run([0, 0], 10 * (wait + 1))
    assert drafted == 10


def test_drafting_that_pays_never_rests() -> None:
    assert Trials(2, plain=1.0, cost=2.0).run([3, 2], 100) == 100


def test_rows_of_which_little_is_known_count_as_the_others() -> None:
    trials = Trials(4, plain=1.0, cost=2.0)
    trials.run([1, 1, 1, 1], 300)
    trials.gains = schedule.admit_gains(trials.gains, jnp.int32(1))
    assert not schedule.due(trials.gains, trials.active)  # one of four is new
    alone = jnp.array([False, True, False, False])
    assert schedule.pays(trials.gains, alone)  # nothing is known of a row that runs


def test_many_new_rows_are_a_reason_for_a_trial_which_decides_for_them() -> None:
    trials = Trials(4, plain=1.0, cost=2.0)
    trials.run([1, 1, 1, 1], 300)
    trials.gains = trials.gains.replace(idle=jnp.int32(schedule.FIRST_WAIT))
    for slot in (0, 1):
        assert not schedule.due(trials.gains, trials.active)
        trials.gains = schedule.admit_gains(trials.gains, jnp.int32(slot))
    assert trials.run([1, 1, 1, 1], 20) == 1  # they are as the others were
    for slot in range(3):
        trials.gains = schedule.admit_gains(trials.gains, jnp.int32(slot))
    assert trials.run([8, 8, 8, 1], 20) > 15


def test_a_trial_that_won_makes_the_next_one_come_soon() -> None:
    trials = Trials(1, plain=1.0, cost=2.0)
    trials.run([1], 400)
    trials.gains = trials.gains.replace(idle=trials.gains.wait)
    trials.run([3], 1)  # not enough to draft for: the mean of eight
    assert not schedule.pays(trials.gains, trials.active)
    assert int(trials.gains.wait) == schedule.FIRST_WAIT


def test_means_go_back_so_many_rounds_and_rows_at_rest_keep_theirs() -> None:
    trials = Trials(2, plain=1.0, cost=2.0)
    trials.active = jnp.array([True, False])
    trials.run([3, 0], 2 * schedule.MEMORY)
    assert trials.gains.rounds.tolist() == [schedule.MEMORY, 0]
    trials.price = 2.0 + schedule.LEAST_ROUNDS
    trials.run([3 + schedule.MEMORY, 9], 1)
    np.testing.assert_allclose(trials.gains.tokens, [4, 0], rtol=1e-6)
    np.testing.assert_allclose(trials.gains.price, 3, rtol=1e-6)


def test_a_trial_learns_what_a_round_of_another_batch_costs() -> None:
    trials = Trials(1, plain=1.0, cost=4.0)
    trials.run([1], 100)
    trials.price = 1.25
    trials.gains = trials.gains.replace(idle=trials.gains.wait)
    trials.run([1], 1)
    np.testing.assert_allclose(trials.gains.price, 1.25)
    assert int(trials.gains.wait) <= 25
