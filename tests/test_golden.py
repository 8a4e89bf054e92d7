"""The nine golden cases: every tensor of every network, and the greedy runs."""

from __future__ import annotations

import json

import pytest
from safetensors.numpy import load_file

from tests.pairs import CASES, GOLDEN, load_pair, observe_run, relative_error
from tests.tiny import Request, quick_compilation

TOLERANCE = 2e-5  # of the tensor's largest magnitude
TENSORS = ("context", "hidden", "base", "logits", "confidence")


@pytest.fixture(autouse=True, scope="module")
def compile_quickly():
    with quick_compilation():
        yield


def test_all_nine_cases_are_here() -> None:
    assert len(CASES) == 9


@pytest.mark.parametrize("case", CASES)
def test_every_tensor_and_the_whole_run(case: str, monkeypatch) -> None:
    folder = GOLDEN / case
    config, params = load_pair(folder, max_length=64, prefill_chunk=8, sampled=False)
    expected = load_file(folder / "golden.safetensors")
    about = json.loads((folder / "golden.json").read_text())
    prompt = expected["prompt_ids"].tolist()
    run = observe_run(config, params, Request(prompt, about["max_new_tokens"]), monkeypatch)
    errors = {
        name: relative_error(run.prompt[name], expected[name])
        for name in ("target_logits", "tapped")
    }
    for i, told in enumerate(about["rounds"]):
        ours = run.rounds[i]
        assert {"start": ours.start, "anchor": ours.anchor} == told
        assert ours.tokens == expected[f"round{i}.tokens"].tolist()
        assert ("confidence" in ours.tensors) == (f"round{i}.confidence" in expected)
        errors |= {
            f"round{i}.{name}": relative_error(ours.tensors[name], expected[f"round{i}.{name}"])
            for name in TENSORS
            if name in ours.tensors
        }
    print(json.dumps(errors))  # pytest -rP shows it
    assert max(errors.values()) < TOLERANCE, errors
    assert prompt + run.decoded.tokens == expected["output_ids"].tolist()
    assert run.decoded.acceptance_lengths == about["acceptance_lengths"]
    assert run.decoded.proposal_lengths == about["proposal_lengths"]
