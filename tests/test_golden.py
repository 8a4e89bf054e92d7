"""The nine golden cases: every tensor of every network, and the greedy runs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from dspark_jax import decode
from tests.pairs import CASES, GOLDEN, load_pair, observed, relative_error
from tests.tiny import Decoded, Request, quick_compilation

TOLERANCE = 2e-5  # of the tensor's largest magnitude
CHUNK = 8
TENSORS = ("context", "hidden", "base", "logits", "confidence")


@pytest.fixture(autouse=True, scope="module")
def compile_quickly():
    with quick_compilation():
        yield


@dataclass
class Case:
    config: Any
    params: Any
    tensors: dict[str, np.ndarray]
    about: dict[str, Any]


@pytest.fixture(scope="module", params=CASES)
def case(request) -> Case:
    folder = GOLDEN / request.param
    config, params = load_pair(folder, max_length=64, prefill_chunk=CHUNK, sampled=False)
    return Case(
        config,
        params,
        load_file(folder / "golden.safetensors"),
        json.loads((folder / "golden.json").read_text()),
    )


def test_all_nine_cases_are_here() -> None:
    assert len(CASES) == 9


def observed_prefill(case: Case, patch: Any) -> tuple[Any, int, dict[str, np.ndarray]]:
    """State and first token after the prompt, and the tensors of its chunks joined."""
    prompt = case.tensors["prompt_ids"].tolist()
    state = decode.init_state(case.config, 1)
    request = Request(prompt, case.about["max_new_tokens"])
    state = decode.admit(case.config, state, jnp.int32(0), request.settings())
    prefill, chunks, first = observed(decode.prefill, patch), [], None
    for begin in range(0, len(prompt), CHUNK):
        part = prompt[begin : begin + CHUNK]
        (state, first), seen = prefill(
            case.config,
            case.params,
            state,
            jnp.int32(0),
            jnp.asarray(part + [0] * (CHUNK - len(part))),
            jnp.int32(len(part)),
            jnp.bool_(begin + CHUNK >= len(prompt)),
        )
        chunks.append({name: x[0, : len(part)] for name, x in seen.items()})
    joined = {name: np.concatenate([c[name] for c in chunks]) for name in chunks[0]}
    return state, int(first.token), joined


def test_every_tensor_and_the_whole_run(case: Case, monkeypatch) -> None:
    expected, errors = case.tensors, {}
    state, first, prompt_pass = observed_prefill(case, monkeypatch)
    for name in ("target_logits", "tapped"):
        errors[name] = relative_error(prompt_pass[name], expected[name])
    draft_step, decoded = observed(decode.draft_step, monkeypatch), Decoded([first])
    told = iter(case.about["rounds"])
    for i in range(len(case.about["acceptance_lengths"])):
        assert not bool(state.done[0])
        before = state.cached[0], state.anchor[0], state.context_len[0]
        start, anchor, context_len = map(int, before)
        (state, proposal), seen = draft_step(case.config, case.params, state)
        if (entry := next(told, None)) is not None:
            assert {"start": start, "anchor": anchor} == entry
            seen["context"] = (
                seen["context"][:, :context_len] if i else prompt_pass["context"][None]
            )
            seen["confidence"] = proposal.confidence
            errors |= round_errors(i, seen, expected)
            assert proposal.tokens[0].tolist() == expected[f"round{i}.tokens"].tolist()
        state, output = decode.verify_step(case.config, case.params, state, proposal)
        emitted, _, proposed, _ = output.counts[0].tolist()
        decoded.tokens += output.tokens[0, :emitted].tolist()
        decoded.acceptance_lengths.append(emitted)
        decoded.proposal_lengths.append(proposed)
    assert bool(state.done[0])
    print(json.dumps(errors))  # pytest -rP shows it
    assert max(errors.values()) < TOLERANCE, errors
    length = case.about["max_new_tokens"]
    assert decoded.tokens[:length] == expected["output_ids"][-length:].tolist()
    assert decoded.acceptance_lengths == case.about["acceptance_lengths"]
    assert decoded.proposal_lengths == case.about["proposal_lengths"]


def round_errors(index: int, seen: dict[str, Any], expected: dict[str, np.ndarray]) -> dict:
    """Errors of one round's tensors; there is a confidence where the reference has one."""
    names = [name for name in TENSORS if f"round{index}.{name}" in expected]
    assert ("confidence" in names) == (seen["confidence"].shape[1] > 0)
    return {
        f"round{index}.{name}": relative_error(seen[name][0], expected[f"round{index}.{name}"])
        for name in names
    }
