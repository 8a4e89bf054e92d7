"""The convert command: its report, its flags, and what it says when they make no sense."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from convert.__main__ import main
from tests.checkpoints import save_json, write_draft, write_target
from tests.tiny_pair import TinyPair

PAIR = TinyPair()


@pytest.fixture
def pair(tmp_path: Path) -> list[str]:
    target = write_target(tmp_path / "t", PAIR)
    return ["--target", str(target), "--draft", str(write_draft(tmp_path / "d", PAIR))]


def test_the_report_says_what_was_found_and_where(
    pair: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*pair, "--check"]) == 0
    lines = capsys.readouterr().out.splitlines()
    text = "\n".join(lines)
    assert lines[-1].split() == ["verdict", "fit"]
    for words in (
        "deepspec (architecture Qwen3DSparkModel)",
        "5  (config.json: block_size)",
        "True  (packaging deepspec)",
        "lm_head.weight (model.safetensors): equal to the target's, which is shared",
        "stop token ids   [3, 7]",
        "for one row of 512 tokens",
    ):
        assert words in text


def test_memory_is_for_the_asked_dtype_and_length(
    pair: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    sums = {}
    for dtype, length in (("bfloat16", 64), ("float32", 64), ("float32", 512)):
        arguments = [*pair, "--check", "--json", "--dtype", dtype, "--max-length", str(length)]
        assert main(arguments) == 0
        sums[dtype, length] = json.loads(capsys.readouterr().out)["memory"]
    narrow, wide = sums["bfloat16", 64], sums["float32", 64]
    assert wide["target_bytes"] == 2 * narrow["target_bytes"]
    assert wide["cache_bytes"] == 2 * narrow["cache_bytes"]
    assert sums["float32", 512]["cache_bytes"] > wide["cache_bytes"]


def test_overrides_are_flags(pair: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--block-size", "4", "--mask-token-id", "2", "--target-layer-ids", "1,2,3"]
    assert main([*pair, "--check", "--json", *flags, "--no-sample-from-anchor"]) == 0
    settings = json.loads(capsys.readouterr().out)["draft"]["settings"]
    assert settings["block_size"] == {"value": 4, "from": "override"}
    assert settings["mask_token_id"] == {"value": 2, "from": "override"}
    assert settings["target_layer_ids"] == {"value": [1, 2, 3], "from": "override"}
    assert settings["sample_from_anchor"] == {"value": False, "from": "override"}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "nothing to do: give --check, --out STORE, --export-stablehlo DIR, or several"),
        (["--check", "--target", ""], "--target is empty: name a folder or a hub id"),
        (["--check", "--draft", ""], "--draft is empty: name a folder or a hub id"),
        (["--json", "--out", "x"], "--json goes with --check"),
        (["--check", "--block-size", "0"], "must be at least 1"),
        (["--check", "--block-size", "abc"], "--block-size: must be a whole number, got 'abc'"),
        (["--check", "--target-layer-ids", "a,b"], "must be numbers with commas"),
        (["--check", "--strange"], "unrecognized arguments: --strange"),
        (["--check", "--dtype", "int8"], "invalid choice"),
    ],
)
def test_flags_that_make_no_sense_end_with_code_2(
    pair: list[str], flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*pair, *flags])
    assert caught.value.code == 2
    (sentence,) = capsys.readouterr().err.splitlines()
    assert sentence.startswith("python -m convert: ")
    assert words in sentence


def test_overrides_need_a_draft(pair: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*pair[:2], "--check", "--block-size", "4"])
    assert "the overrides go with --draft" in capsys.readouterr().err


def test_check_and_out_together_write_only_what_fits(
    pair: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "store"
    tree = json.loads((tmp_path / "d" / "config.json").read_text())
    save_json(tmp_path / "d" / "config.json", tree | {"markov_rank": 7})
    assert main([*pair, "--check", "--out", str(store)]) == 2
    assert not store.exists()
    save_json(tmp_path / "d" / "config.json", tree)
    assert main([*pair, "--check", "--out", str(store)]) == 0
    assert (store / "dspark_store.json").exists()
    assert main(["--target", str(store), "--check"]) == 2
    assert "is a converted store" in capsys.readouterr().err


def test_a_target_alone_is_checked(pair: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*pair[:2], "--check", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["draft"] is None
    assert report["memory"]["draft_bytes"] == 0
