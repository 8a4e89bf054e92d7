"""Tokens on a mesh are those of one device. Run by test_sharding, with eight devices."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import pytest

from dspark_jax import SamplingParams, load
from tests.checkpoints import write_draft, write_target
from tests.pairs import GOLDEN
from tests.tiny import quick_compilation
from tests.tiny_pair import TinyPair

PROMPTS = [[5, 9, 2, 40, 41], [7] * 20, [1, 2, 3], [33, 8]]
GREEDY = SamplingParams(max_tokens=20)
DRAWN = SamplingParams(max_tokens=20, temperature=0.9, top_p=0.95, seed=11)
MIXED = [GREEDY, DRAWN, DRAWN, GREEDY]  # in the programs of sampled rows
OPTIONS: dict[str, Any] = {"dtype": "float32", "max_length": 64, "prefill_chunk": 16}


@pytest.fixture(autouse=True, scope="module")
def compile_quickly():
    with quick_compilation():
        yield


def decode(
    pair: tuple[Any, ...], tensor: int, data: int, batches: Sequence[Any] = (MIXED,)
) -> list[list[Any]]:
    """Tokens and rounds of four prompts decoded together."""
    sizes = {"tensor_parallel": tensor, "data_parallel": data}
    engine = load(*pair, max_batch=4, report=lambda line: None, **(OPTIONS | sizes))
    assert len(jax.tree.leaves(engine.params)[0].sharding.device_set) == tensor * data
    return [
        [(one.token_ids, one.acceptance_lengths) for one in engine.generate(PROMPTS, batch)]
        for batch in batches
    ]


@pytest.fixture(scope="module")
def embedded() -> list[list[Any]]:
    return decode((), 1, 1)


@pytest.mark.parametrize(("tensor", "data"), [(1, 2), (1, 4), (2, 1), (2, 2), (2, 4)])
def test_the_embedded_pair(embedded: Any, tensor: int, data: int) -> None:
    assert decode((), tensor, data) == embedded


def test_biased_projections_of_four_heads() -> None:
    pair = GOLDEN / "bias_mha" / "target", GOLDEN / "bias_mha" / "draft"
    assert decode(pair, 4, 1) == decode(pair, 1, 1)


@pytest.fixture(scope="module")
def eight_heads(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder, pair = (
        tmp_path_factory.mktemp("pair"),
        TinyPair(heads=8, kv_heads=4, depth=3, taps=(0, 1)),
    )
    return write_target(folder / "target", pair), write_draft(folder / "draft", pair, "deepspec")


def test_eight_query_and_four_key_heads(eight_heads: tuple[Path, Path]) -> None:
    """Greedy rows in their own programs too."""
    both = (GREEDY, MIXED)
    assert decode(eight_heads, 4, 1, both) == decode(eight_heads, 1, 1, both)


@pytest.fixture(scope="module")
def shallow(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """What the engine does around the networks is compiled with as little of them as there is."""
    folder, pair = tmp_path_factory.mktemp("shallow"), TinyPair(depth=2, draft_depth=1, taps=(0,))
    return write_target(folder / "target", pair), write_draft(folder / "draft", pair, "deepspec")


def test_prompt_lookup(shallow: tuple[Path, Path]) -> None:
    pair = (shallow[0], "ngram")
    assert decode(pair, 2, 2) == decode(pair, 1, 1)


def test_scheduled_verification(shallow: tuple[Path, Path]) -> None:
    """Under Gumbel verification the schedule moves no token, and on a mesh it is the same one."""
    found = []
    for tensor in (1, 2):
        engine = load(
            *shallow,
            max_batch=4,
            tensor_parallel=tensor,
            rejection="gumbel",
            verification="scheduled",
            report=lambda line: None,
            **OPTIONS,
        )
        results = engine.generate(PROMPTS, MIXED)
        found.append([(one.token_ids, one.proposal_lengths) for one in results])
    assert found[0] == found[1]
    lengths = [n for _, proposed in found[0] for n in proposed]
    assert len(set(lengths)) > 1


def test_requests_with_controls_and_log_probabilities(shallow: tuple[Path, Path]) -> None:
    params = SamplingParams(
        max_tokens=12, temperature=0.7, seed=3, logprobs=2, frequency_penalty=0.4, min_tokens=8
    )
    found = []
    for tensor, data in ((1, 1), (2, 2)):
        sizes = {"tensor_parallel": tensor, "data_parallel": data}
        engine = load(*shallow, max_batch=2, **OPTIONS, **sizes)
        found.append(engine.generate(PROMPTS[:2], params))
    for alone, spread in zip(*found, strict=True):
        assert alone.token_ids == spread.token_ids
        for one, other in zip(alone.logprobs, spread.logprobs, strict=True):
            assert one.keys() == other.keys()
            assert list(one.values()) == pytest.approx(list(other.values()), abs=1e-5)


def test_rows_that_move_to_another_batch(shallow: tuple[Path, Path]) -> None:
    found = []
    for tensor, data in ((1, 1), (2, 2)):
        sizes = {"tensor_parallel": tensor, "data_parallel": data}
        engine = load(*shallow, max_batch=4, report=lambda line: None, **OPTIONS, **sizes)
        engine.warmup(GREEDY, batches=[data, 4])
        handles = [engine.submit(PROMPTS[0], SamplingParams(max_tokens=40), rounds=1)]
        engine.step()
        engine.step()
        handles += [engine.submit(prompt, SamplingParams(max_tokens=4)) for prompt in PROMPTS[1:]]
        moves, batch = [], 0
        while engine.busy:
            engine.step()
            if batch != (batch := engine._loop._tier.batch):
                moves.append(batch)
        assert moves == ([4, 1] if data == 1 else [4, 2])
        found.append([handle.result().token_ids for handle in handles])
    assert found[0] == found[1]
