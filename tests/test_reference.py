"""The embedded pair against what the published PyTorch reference computed on it, in float32."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest

from tests.oracles import clustered_ratio
from tests.pairs import DEMO, HERE, load_pair
from tests.tiny import Decoded, Request, decoding, run

BATCH = 8
TOLD = json.loads((HERE / "demo" / "reference.json").read_text())
STOPS = json.loads((HERE / "demo" / "stops.json").read_text())
SEEDS = (11, 12, 13)  # not those of the reference: the two samples are independent


@cache
def pair(threshold: float = 0.0, sampled: bool = False) -> tuple[Any, Any]:
    if (threshold, sampled) != (0.0, False):
        config, params = pair()
        return decoding(config, confidence_threshold=threshold, sampled=sampled), params
    return load_pair(DEMO, max_length=256, prefill_chunk=64, sampled=False)


def decode_in_turns(config: Any, params: Any, requests: Sequence[Request]) -> list[Decoded]:
    """All requests, BATCH at a time in one state."""
    results, state = [], None
    for begin in range(0, len(requests), BATCH):
        part = requests[begin : begin + BATCH]
        done, state = run(config, params, part, batch=BATCH, state=state)
        results += done
    return results


def assert_runs(config: Any, params: Any, told: Sequence[dict[str, Any]]) -> None:
    requests = [
        Request(one["prompt_ids"], one["max_new_tokens"], stop_ids=one["stop_token_ids"])
        for one in told
    ]
    for one, result in zip(told, decode_in_turns(config, params, requests), strict=True):
        assert one["prompt_ids"] + result.tokens == one["output_ids"]
        assert result.acceptance_lengths == one["acceptance_lengths"]
        assert result.proposal_lengths == one["proposal_lengths"]


@pytest.mark.parametrize("threshold", [0.0, 0.5])
def test_greedy_runs(threshold: float) -> None:
    told = [one for one in TOLD["greedy"] if one["confidence_threshold"] == threshold]
    assert len(told) == 8
    assert_runs(*pair(threshold), told)


def test_stop_tokens() -> None:
    assert len(STOPS) > 10
    assert_runs(*pair(), STOPS)


@pytest.fixture(scope="module")
def sampled_lengths() -> list[list[int]]:
    """Acceptance lengths of each run at temperature 1, one prompt and seed a run."""
    told = TOLD["sampled"]
    requests = [
        Request(prompt, told["max_new_tokens"], told["temperature"], seed=seed, stop_ids=[0])
        for seed in SEEDS
        for prompt in told["prompts"].values()
    ]
    results = decode_in_turns(*pair(sampled=True), requests)
    return [result.acceptance_lengths for result in results]


def assert_same_mean(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> None:
    """Means over all rounds agree within three joint standard errors, clustered by run."""
    sides = [
        clustered_ratio([sum(x) for x in runs], [len(x) for x in runs]) for runs in (ours, theirs)
    ]
    (our_mean, our_error), (their_mean, their_error) = sides
    print(
        f"ours {our_mean:.4f} +- {our_error:.4f}, reference {their_mean:.4f} +- {their_error:.4f}"
    )
    assert abs(our_mean - their_mean) < 3 * np.hypot(our_error, their_error)


def test_sampled_acceptance_length(sampled_lengths) -> None:
    theirs = [one["acceptance_lengths"] for one in TOLD["sampled"]["runs"]]
    mean, error = clustered_ratio([sum(x) for x in theirs], [len(x) for x in theirs])
    assert (round(mean, 3), round(error, 3)) == (2.047, 0.030)
    assert_same_mean(sampled_lengths, theirs)


@pytest.mark.parametrize("position", range(7))
def test_sampled_survival(sampled_lengths, position: int) -> None:
    def survived(runs: Sequence[Sequence[int]]) -> list[list[int]]:
        return [[n - 1 > position for n in lengths] for lengths in runs]

    theirs = [one["acceptance_lengths"] for one in TOLD["sampled"]["runs"]]
    assert_same_mean(survived(sampled_lengths), survived(theirs))
