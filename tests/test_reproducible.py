"""The same request gives the same tokens alone, in any row, streamed, and on any jax version.

`demo/sampled.json` holds what the embedded pair drew in float32 on a CPU. `python -m
tests.test_reproducible` writes it anew: do that only when the key schedule changes on purpose.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from dspark_jax import SamplingParams, load
from tests.pairs import HERE

RECORD = HERE / "demo" / "sampled.json"
PROMPTS = ("def fibonacci(n):\n", "import os\nimport sys\n\n\ndef main", "class Stack:\n", "x = [")
SETTINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.7, "top_p": 0.9, "seed": 2**40 + 3},
    {"temperature": 1.3, "top_k": 12, "seed": 5, "max_tokens": 17},
    {"temperature": 0.9, "min_p": 0.05, "presence_penalty": 0.5, "seed": 7, "max_tokens": 9},
)
REJECTIONS = ("token", "block", "gumbel")


def params() -> list[SamplingParams]:
    return [SamplingParams(**({"max_tokens": 24, "ignore_eos": True} | each)) for each in SETTINGS]


def drawn(rejection: str) -> tuple[Any, list[list[int]]]:
    """An engine and the tokens of all requests in one batch."""
    engine = load(dtype="float32", max_length=128, max_batch=4, rejection=rejection)
    return engine, [result.token_ids for result in engine.generate(PROMPTS, params())]


@pytest.mark.parametrize("rejection", REJECTIONS)
def test_tokens_are_those_recorded_on_another_version(rejection: str) -> None:
    engine, together = drawn(rejection)
    assert together == json.loads(RECORD.read_text())[rejection]
    turned = engine.generate(PROMPTS[::-1], params()[::-1])
    assert [result.token_ids for result in turned] == together[::-1], "a row's slot shows"
    alone = engine.generate(PROMPTS[1], params()[1])[0]
    assert alone.token_ids == together[1], "a row's neighbours show"
    streamed = [token for c in engine.stream(PROMPTS[2], params()[2]) for token in c.token_ids]
    assert streamed == together[2], "streaming shows"


if __name__ == "__main__":
    RECORD.write_text(json.dumps({name: drawn(name)[1] for name in REJECTIONS}) + "\n")
