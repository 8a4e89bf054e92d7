"""Embedding, head and vocabulary: own, borrowed, tied, padded, reduced."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from convert import CheckpointError
from convert.apply import load_draft_params, load_target_params
from convert.packaging import read_draft, read_target, share_with_target
from tests.checkpoints import save_json, save_tensors, write_draft, write_reduced, write_target
from tests.dialects import DIALECTS
from tests.test_packaging import read_pair
from tests.tiny_pair import TinyPair


def test_a_reduced_vocabulary_keeps_its_own_head_and_absolute_ids(tmp_path: Path) -> None:
    pair, kept = TinyPair(), np.array([1, 2, 5, 9, 33, 61])
    target = read_target(write_target(tmp_path / "target", pair))
    draft = read_draft(write_reduced(tmp_path / "draft", pair, kept), target)
    draft = share_with_target(draft, target)
    config = draft.config
    assert (config.vocab_size, config.draft_vocab_size) == (64, 6)
    assert (config.own_embedding, config.own_head) == (False, True)
    params = load_draft_params(draft, "float32")
    assert params["draft_to_target"].dtype == "int32"
    np.testing.assert_array_equal(params["draft_to_target"], kept)
    assert params["markov_head"]["markov_w1"]["weight"].shape == (64, 8)
    assert params["markov_head"]["markov_w2"]["weight"].shape == (6, 8)


def test_a_padded_head_is_cut_to_the_ids_the_target_has(tmp_path: Path) -> None:
    pair = TinyPair()
    target = read_target(write_target(tmp_path / "target", pair))
    folder = write_draft(tmp_path / "draft", pair)
    tree, tensors = DIALECTS["deepspec"](pair)
    for name in ("lm_head.weight", "embed_tokens.weight", "markov_head.markov_w1.weight"):
        padding = np.zeros((16, tensors[name].shape[1]), tensors[name].dtype)
        tensors[name] = np.concatenate([tensors[name], padding])
    save_tensors(folder / "model.safetensors", tensors)
    save_json(folder / "config.json", tree | {"vocab_size": 80})
    padded = read_draft(folder, target)
    assert padded.config.draft_vocab_size == padded.config.vocab_size == 64
    assert any("80 rows, of which the first 64 are used" in w for w in padded.warnings)
    params = load_draft_params(padded, "float32")
    assert params["lm_head"]["weight"].shape == (64, 32)
    np.testing.assert_array_equal(params["lm_head"]["weight"], pair.head().astype(np.float32))


def test_a_confidence_head_without_a_bias_gets_zero(tmp_path: Path) -> None:
    pair = TinyPair()
    target = read_target(write_target(tmp_path / "target", pair))
    folder = write_draft(tmp_path / "draft", pair, "specforge")
    tensors = dict(pair.draft)
    tensors.pop("confidence_head.proj.bias")
    save_tensors(folder / "model.safetensors", tensors)
    params = load_draft_params(read_draft(folder, target), "float32")
    assert params["confidence_head"]["proj"]["bias"].tolist() == [0.0]


def test_own_embedding_and_head_stay_where_they_differ(tmp_path: Path) -> None:
    pair = TinyPair()
    target = read_target(write_target(tmp_path / "target", pair))
    for embedding, head in itertools.product([True, False], repeat=2):
        folder = tmp_path / f"{embedding}{head}"
        tree, tensors = DIALECTS["deepspec"](pair)
        tensors = {n: np.array(x) for n, x in tensors.items()}
        tensors["embed_tokens.weight"][-1, -1] += 1 if embedding else 0
        tensors["lm_head.weight"][0, 0] += 1 if head else 0
        save_json(folder / "config.json", tree)
        save_tensors(folder / "model.safetensors", tensors)
        shared = share_with_target(read_draft(folder, target), target)
        assert (shared.config.own_embedding, shared.config.own_head) == (embedding, head)
        params = load_draft_params(shared, "float32")
        assert ("embed_tokens" in params, "lm_head" in params) == (embedding, head)
        reasons = [entry.reason for entry in shared.ignored]
        assert reasons.count("equal to the target's, which is shared") == 2 - embedding - head


def test_a_tied_target_lends_its_embedding_as_the_head(tmp_path: Path) -> None:
    pair = TinyPair(tied=True)
    source = read_pair(tmp_path, pair, "deepspec")
    assert not source.config.own_head
    target = read_target(tmp_path / "target")
    assert "lm_head" not in load_target_params(target, "float32")


def test_a_stored_head_of_a_tied_target_must_be_the_embedding(tmp_path: Path) -> None:
    pair = TinyPair(tied=True)
    folder = write_target(tmp_path, pair)
    tensors = {f"model.{n}": x for n, x in pair.target.items()}
    tensors["lm_head.weight"] = np.array(pair.head())
    save_tensors(folder / "model.safetensors", tensors)
    load_target_params(read_target(folder), "float32")
    tensors["lm_head.weight"][3, 3] += 1
    save_tensors(folder / "model.safetensors", tensors)
    with pytest.raises(CheckpointError, match="differs from"):
        load_target_params(read_target(folder), "float32")
