"""Logits to law and law to token: transformers' order and edges, rows that differ, fair draws."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from dspark_jax import sampling
from tests import oracles

ROWS, VOCAB = 400, 9


def settings(**arrays: Any) -> sampling.Sampling:
    """Sampling fields of many rows; what is not given is off."""
    count = len(next(iter(arrays.values())))
    fields = {
        "temperature": np.ones(count, np.float32),
        "top_p": np.ones(count, np.float32),
        "top_k": np.zeros(count, np.int32),
        "min_p": np.zeros(count, np.float32),
        "seed": np.zeros((count, 2), np.uint32),
    }
    return sampling.Sampling(**{k: jnp.asarray(v) for k, v in (fields | arrays).items()})


def law(logits: np.ndarray, rows: sampling.Sampling) -> np.ndarray:
    return np.asarray(sampling.token_law(jnp.asarray(logits)[:, None], rows))[:, 0]


def warped(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> Any:
    scores = TemperatureLogitsWarper(temperature)(None, torch.tensor(logits)[None])
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    if min_p:
        scores = MinPLogitsWarper(min_p)(None, scores)
    return torch.softmax(scores, -1)[0].numpy()


@pytest.mark.parametrize("tied", [False, True])
def test_rows_of_any_settings_follow_transformers(tied: bool) -> None:
    rng = np.random.default_rng(0)
    logits = (rng.normal(size=(ROWS, VOCAB)) * 2).astype(np.float32)
    logits = np.round(logits) if tied else logits
    temperature = rng.uniform(0.3, 2, ROWS).astype(np.float32)
    top_k = rng.integers(0, VOCAB + 3, ROWS).astype(np.int32)
    top_p = rng.uniform(0.01, 1.3, ROWS).clip(max=1).astype(np.float32)
    min_p = (rng.uniform(0, 1, ROWS) * (rng.random(ROWS) < 0.5)).astype(np.float32)
    rows = settings(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    ours = law(logits, rows)
    for i in range(ROWS):
        each = float(temperature[i]), int(top_k[i]), float(top_p[i]), float(min_p[i])
        np.testing.assert_allclose(ours[i], warped(logits[i], *each), atol=1e-5, err_msg=str(each))
        if not tied:
            np.testing.assert_allclose(ours[i], oracles.sampling_law(logits[i], *each), atol=1e-5)


def test_a_cold_row_is_greedy_and_a_filter_keeps_one_id() -> None:
    logits = np.tile(np.array([1.0, 3.0, 3.0, 2.0], np.float32), (6, 1))
    rows = settings(
        temperature=np.array([0, 9e-6, 2e-5, 1, 1, 1], np.float32),
        top_k=np.array([0, 2, 0, 1, 0, 0], np.int32),
        top_p=np.array([0.5, 1, 1, 1, 1e-6, 1], np.float32),
        min_p=np.array([0, 0, 0, 0, 0, 1], np.float32),
    )
    expected = [
        [0, 1, 0, 0],  # greedy: the first of the largest, whatever the filters say
        [0, 1, 0, 0],
        [0, 0.5, 0.5, 0],
        [0, 0.5, 0.5, 0],  # what ties with the k-th stays
        [0, 0, 1, 0],
        [0, 0.5, 0.5, 0],
    ]
    np.testing.assert_allclose(law(logits, rows), expected, atol=1e-6)


def test_filters_of_one_row_leave_the_others_alone() -> None:
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(3, VOCAB)).astype(np.float32)
    mixed = law(logits, settings(top_k=np.array([0, 2, 0], np.int32)))
    free = law(logits, settings(top_k=np.zeros(3, np.int32)))
    np.testing.assert_allclose(mixed[[0, 2]], free[[0, 2]], atol=1e-7)
    assert (mixed[1] > 0).sum() == 2
    untruncated = sampling.token_law(
        jnp.asarray(logits)[:, None], settings(top_k=np.array([1, 2, 3], np.int32)), truncate=False
    )
    np.testing.assert_allclose(np.asarray(untruncated)[:, 0], free, atol=1e-7)


def test_a_row_without_top_p_keeps_its_tail_beside_one_with() -> None:
    """Its first id rounds to the whole mass, which is no reason to cut the others."""
    logits = np.tile(np.array([0, -18, -19], np.float32), (2, 1))
    rows = settings(top_p=np.array([1, 0.5], np.float32))
    assert (law(logits, rows) > 0).tolist() == [[True, True, True], [True, False, False]]


def test_the_largest_is_the_first_of_equals_and_always_an_id() -> None:
    values = jnp.array([[1, 3, 3], [jnp.nan] * 3, [-jnp.inf] * 3])
    assert sampling.largest(values).tolist() == [1, 2, 0]


def test_draws_follow_the_law_and_never_take_a_zero() -> None:
    count, wished = 100_000, np.array([0.5, 0.0, 0.3, 0.2, 0.0], np.float32)
    rows = settings(temperature=np.ones(count, np.float32))
    keys = sampling.stream_keys(rows, sampling.Stream.TARGET, jnp.arange(count))
    noise = sampling.gumbel_noise(keys, len(wished))
    tokens = np.asarray(sampling.draw(jnp.asarray(np.tile(wished, (count, 1))), noise))
    shares = np.bincount(tokens, minlength=len(wished)) / count
    assert shares[1] == shares[4] == 0
    assert (np.abs(shares - wished) < 5 * np.sqrt(wished * (1 - wished) / count) + 1e-9).all()


def test_noise_reaches_far_enough_for_a_large_vocabulary() -> None:
    """Noise of 23 random bits ends below 16; ids of a probability of 1e-7 could never win."""
    rows = settings(temperature=np.ones(64, np.float32))
    keys = sampling.stream_keys(rows, sampling.Stream.TARGET, jnp.arange(64))
    noise = np.asarray(sampling.gumbel_noise(keys, 200_000))
    assert np.isfinite(noise).all()
    exceed = (noise > 12).mean()  # the tail is exp(-x)
    assert abs(exceed - np.exp(-12)) < 5 * np.sqrt(np.exp(-12) / noise.size)


def test_coins_are_uniform_and_below_one() -> None:
    rows = settings(temperature=np.ones(20_000, np.float32))
    coins = np.asarray(sampling.coins(rows, jnp.arange(20_000), 3))
    assert coins.min() >= 0
    assert coins.max() < 1
    counts, _ = np.histogram(coins, bins=20, range=(0, 1))
    expected = coins.size / 20
    assert ((counts - expected) ** 2 / expected).sum() < 60  # chi-square of 19 degrees
    assert np.abs(np.corrcoef(coins.T) - np.eye(3)).max() < 0.05
