"""Every figure against the reference record, hand-counted rounds, and empty input."""

import json
from pathlib import Path

import pytest

from dspark_jax import metrics
from dspark_jax.metrics import RoundRecord

REFERENCE = json.loads((Path(__file__).parent / "demo" / "reference.json").read_text())


def records(runs):
    return [RoundRecord(r["acceptance_lengths"], r["proposal_lengths"]) for r in runs]


def test_reference_summary_of_sampled_runs():
    runs = records(REFERENCE["sampled"]["runs"])
    summary = REFERENCE["sampled"]["summary"]
    assert metrics.rounds(runs) == summary["rounds"] == 3579
    assert metrics.acceptance_length(runs) == pytest.approx(summary["mean"], abs=1e-12)
    assert metrics.macro(metrics.acceptance_length, runs) == pytest.approx(
        summary["mean_per_request"], abs=1e-12
    )
    assert metrics.survival_by_position(runs) == pytest.approx(summary["survival_by_position"])


def test_rates_divide_by_the_rounds_that_proposed_so_far():
    runs = [
        RoundRecord([3, 1], [3, 0], [2, 0]),
        RoundRecord([2], [2], [2]),  # a stop inside the accepted prefix: no bonus
    ]
    assert metrics.acceptance_length(runs) == 6 / 3
    assert metrics.drafts_per_round(runs) == 5 / 3
    assert metrics.verified_per_round(runs) == 1 + 5 / 3
    assert metrics.verify_rate(runs) == 6 / (5 + 3)
    assert metrics.accept_rates_by_position(runs) == [2 / 2, 2 / 2, 0 / 1]
    assert metrics.survival_by_position(runs) == [2 / 3, 1 / 3, 0]
    assert metrics.conditional_rates_by_position(runs) == [2 / 3, 1 / 2, 0]
    assert metrics.macro(metrics.acceptance_length, runs) == (4 / 2 + 2) / 2


def test_conditional_rates_multiply_to_the_survival():
    runs = records(REFERENCE["sampled"]["runs"])
    product = 1.0
    for rate, survival in zip(
        metrics.conditional_rates_by_position(runs),
        metrics.survival_by_position(runs),
        strict=True,
    ):
        product *= rate
        assert product == pytest.approx(survival)


def test_plain_decoding_accepts_one_and_proposes_nothing():
    plain = [RoundRecord([1] * 5, [0] * 5)]
    assert metrics.acceptance_length(plain) == 1
    assert metrics.verify_rate(plain) == 1
    assert metrics.accept_rates_by_position(plain) == []


def test_no_rounds_is_none_not_zero():
    empty = [RoundRecord([], [])]
    for figure in (metrics.acceptance_length, metrics.drafts_per_round, metrics.verify_rate):
        assert figure(empty) is None
        assert metrics.macro(figure, empty) is None
    assert metrics.accept_rates_by_position(empty) == []
    both = [RoundRecord([], []), RoundRecord([2], [1])]
    assert metrics.macro(metrics.acceptance_length, both) == 2


def test_uneven_lists_are_refused():
    with pytest.raises(ValueError, match="one entry a round"):
        RoundRecord([1, 2], [1])
