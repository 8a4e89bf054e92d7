"""The PyTorch yardstick itself: it reproduces the published reference's golden runs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from transformers import DynamicCache

from tests.torch_reference import generate, load_draft, load_target, tapped_forward

HERE = Path(__file__).parent
GOLDEN = HERE / "golden"
DEMO = HERE.parent / "dspark_jax" / "demo"
CASES = sorted(folder.name for folder in GOLDEN.iterdir() if folder.is_dir())
TOLERANCE = 2e-5  # of the tensor's largest magnitude


def assert_close(actual, expected: np.ndarray) -> None:
    actual = np.asarray(actual)
    assert actual.shape == expected.shape
    error = np.abs(actual - expected).max() / np.abs(expected).max()
    assert error < TOLERANCE, f"relative error {error}"


def test_all_nine_cases_are_here() -> None:
    assert len(CASES) == 9


@pytest.mark.parametrize("case", CASES)
def test_golden_case(case: str) -> None:
    target = load_target(GOLDEN / case / "target")
    draft = load_draft(GOLDEN / case / "draft", target)
    expected = load_file(GOLDEN / case / "golden.safetensors")
    about = json.loads((GOLDEN / case / "golden.json").read_text())
    prompt = expected["prompt_ids"].tolist()
    logits, tapped = tapped_forward(target, prompt, draft.taps, DynamicCache())
    assert_close(logits, expected["target_logits"])
    assert_close(tapped, expected["tapped"])
    run = generate(target, draft, prompt, max_new_tokens=about["max_new_tokens"])
    assert run.output_ids == expected["output_ids"].tolist()
    assert run.acceptance_lengths == about["acceptance_lengths"]
    assert run.proposal_lengths == about["proposal_lengths"]
    for i, told in enumerate(about["rounds"]):
        block = run.rounds[i].block
        assert (run.rounds[i].start, run.rounds[i].anchor) == (told["start"], told["anchor"])
        assert block.tokens == expected[f"round{i}.tokens"].tolist()
        for name in ("context", "hidden", "base", "logits"):
            assert_close(getattr(block, name), expected[f"round{i}.{name}"])
        assert (block.confidence is not None) == (f"round{i}.confidence" in expected)
        if block.confidence is not None:
            assert_close(block.confidence, expected[f"round{i}.confidence"])


@pytest.fixture(scope="module")
def demo():
    target = load_target(DEMO / "target")
    return target, load_draft(DEMO / "draft", target)


def told_runs() -> list[dict]:
    greedy = json.loads((HERE / "demo" / "reference.json").read_text())["greedy"]
    return greedy + json.loads((HERE / "demo" / "stops.json").read_text())


@pytest.mark.parametrize("index", range(len(told_runs())))
def test_demo_run(demo, index: int) -> None:
    told = told_runs()[index]
    run = generate(
        *demo,
        told["prompt_ids"],
        max_new_tokens=told["max_new_tokens"],
        stop_token_ids=told["stop_token_ids"],
        confidence_threshold=told.get("confidence_threshold", 0.0),
    )
    assert run.output_ids == told["output_ids"]
    assert run.acceptance_lengths == told["acceptance_lengths"]
    assert run.proposal_lengths == told["proposal_lengths"]


def test_plain_decoding_gives_the_same_greedy_text(demo) -> None:
    told = told_runs()[0]
    plain = generate(demo[0], None, told["prompt_ids"], max_new_tokens=40)
    length = len(told["prompt_ids"]) + 40
    assert plain.output_ids == told["output_ids"][:length]
    assert set(plain.acceptance_lengths) == {1}
    assert set(plain.proposal_lengths) == {0}
