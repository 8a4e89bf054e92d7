"""bench drift: what is compared, and a short run on the embedded pair."""

import json
import math
from types import SimpleNamespace

import pytest

from bench.__main__ import main
from bench.drift import PROMPTS, compare_texts, margin
from dspark_jax.engine import Engine
from tests.tiny import plain_config, quick_compilation, random_params, tiny_config


def text(ids, gaps):
    logprobs = [{0: -0.5, 1: -0.5 - gap, 2: -9.0} for gap in gaps]
    return SimpleNamespace(token_ids=ids, logprobs=logprobs)


def test_the_first_difference_counts():
    plain = [text([1, 2, 3], [2.0, 0.25, 4.0]), text([5, 6, 7], [1.0, 1.0, 1.0])]
    drafted = [text([1, 9, 9], []), text([5, 6, 7], [])]
    found = compare_texts(plain, drafted)
    assert (found["prompts"], found["tokens"]) == (2, 6)
    assert (found["differing"], found["share"], found["first_difference"]) == (1, 0.5, [1])
    assert found["margins"] == [found["median_margin"]] == [found["largest_margin"]] == [0.25]
    assert found["median_margin_of_all"] == 1.0
    same = compare_texts(plain, plain)
    assert (same["differing"], same["median_margin"]) == (0, None)


def test_a_margin_is_of_the_two_likeliest():
    assert margin({7: -3.0, 1: -0.5, 4: -0.75}) == 0.25
    assert margin({7: math.log(0.5), 1: math.log(0.25), 4: -9.0}) == pytest.approx(math.log(2))


def test_there_are_a_hundred_prompts():
    assert len(set(PROMPTS)) == 100


def test_a_pair_in_float32_does_not_drift(tmp_path, monkeypatch, capsys):
    config = tiny_config()
    params = random_params(config, scale=0.15)
    engines = [
        Engine(config, params, max_batch=3, report=lambda line: None),
        Engine(plain_config(config), {"target": params["target"]}, max_batch=3),
    ]
    monkeypatch.setattr("bench.drift.load_drafts", lambda *_: engines)
    monkeypatch.setattr("bench.drift.PROMPTS", ([1, 2, 3], [7], [20, 4, 4, 4]))
    out = tmp_path / "drift.jsonl"
    with quick_compilation():
        code = main(["drift", "--output-len", "24", "--dtype", "float32", "--out", str(out)])
    assert code == 0
    line = json.loads(out.read_text())
    assert (line["prompts"], line["tokens"], line["differing"]) == (3, 72, 0)
    assert "0 of 3 greedy texts of 24 tokens (0 %) differ" in capsys.readouterr().out
