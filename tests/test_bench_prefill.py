"""bench prefill: what is counted, and a run on a tiny pair."""

import json

import numpy as np
import pytest

from bench.__main__ import main
from bench.models import plain
from bench.prefill import compile_prefill, prefill_flops
from dspark_jax import decode
from tests.tiny import random_params, tiny_config

CONFIG = tiny_config(max_length=40)  # chunks of 8
PARAMS = random_params(CONFIG)


def test_flops_by_hand():
    # qkv 12 x 24, o 12 x 12, gate and up 12 x 40, down 20 x 12
    layer = 12 * 24 + 12 * 12 + 12 * 40 + 20 * 12
    attended = 2 * 2 * 6 * (1 + 2 + 3)  # layers, heads, width, keys that three queries see
    expected = 2 * 3 * 2 * layer + 4 * attended
    assert prefill_flops(plain(CONFIG), {"target": PARAMS["target"]}, 3) == expected
    draft = 24 * 12 + 12 * 12  # both taps to the width, keys and values of the one layer
    assert prefill_flops(CONFIG, PARAMS, 3) == expected + 2 * 3 * draft


def test_every_chunk_of_a_prompt_runs():
    prefill = compile_prefill(CONFIG, PARAMS)
    ids = np.arange(1, 20, dtype=np.int32)
    state, first = prefill.run(decode.init_state(CONFIG, 1), ids)
    assert (int(state.cached[0]), int(state.anchor[0])) == (19, first)
    assert np.abs(np.asarray(state.target.k[0][0, :19])).min(axis=(1, 2)).all()  # 3 chunks of 8


def test_records_and_chart(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("bench.prefill.pair", lambda *_, **decoding: (CONFIG, PARAMS))
    out, chart = tmp_path / "prefill.jsonl", tmp_path / "prefill.svg"
    flags = ("--tokens", "20", "9", "--chunk", "8", "--profile", "--out", str(out))
    assert main(["prefill", *flags, "--chart", str(chart)]) == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["shape"]["tokens"] for line in lines] == [9, 20]
    for line in lines:
        tokens = line["shape"]["tokens"]
        assert line["flops"] == prefill_flops(CONFIG, PARAMS, tokens)
        assert line["tokens_per_second"] == pytest.approx(tokens / line["seconds"], rel=1e-2)
        assert line["spread"][0] <= line["seconds"] <= line["spread"][1]
        assert line["temp_bytes"] > 0
        assert line["profile"]["classes"]["matmul"] > 0
    assert "chunks of 8" in chart.read_text()
    assert "time to first token" in capsys.readouterr().out


def test_a_mistake_is_one_sentence(capsys):
    assert main(["prefill", "--chunk", "0"]) == 2
    assert capsys.readouterr().err == "bench prefill: --tokens and --chunk must be positive\n"
