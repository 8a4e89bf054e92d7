"""Weights become parameters: fused in the stated order, in the asked dtype, without a copy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from convert import CheckpointError
from convert.apply import load_draft_params, load_target_params, param_bytes, scan
from convert.names import canonical, draft_plan, target_plan
from convert.packaging import read_draft, read_target, share_with_target
from convert.reader import CHUNK
from convert.tokens import copy_token_files, stop_token_ids
from tests.checkpoints import (
    save_json,
    save_shards,
    save_tensors,
    target_files,
    write_draft,
    write_target,
)
from tests.tiny_pair import TinyPair

GOLDEN = sorted(path.parent for path in Path("tests/golden").glob("*/golden.json"))
DEMO = Path("dspark_jax/demo")


def leaf(params: Any, name: str) -> np.ndarray:
    for key in name.split("."):
        params = params[key]
    return np.asarray(params)


def stack(raw: dict[str, np.ndarray], *names: str) -> np.ndarray:
    return np.concatenate([raw[name].astype(np.float32) for name in names])


def expected_layers(raw: dict[str, np.ndarray], depth: int) -> dict[str, np.ndarray]:
    """The fused layer parameters, stacked naively."""
    made = {}
    for i in range(depth):
        here = f"layers.{i}."
        qkv = [f"{here}self_attn.{part}_proj" for part in "qkv"]
        made[f"{here}self_attn.qkv_proj.weight"] = stack(raw, *(f"{n}.weight" for n in qkv))
        gate_up = [f"{here}mlp.{part}_proj.weight" for part in ("gate", "up")]
        made[f"{here}mlp.gate_up_proj.weight"] = stack(raw, *gate_up)
        if f"{qkv[0]}.bias" in raw:
            made[f"{here}self_attn.qkv_proj.bias"] = stack(raw, *(f"{n}.bias" for n in qkv))
            made[f"{here}self_attn.o_proj.bias"] = stack(raw, f"{here}self_attn.o_proj.bias")
        for name in ("self_attn.o_proj", "self_attn.q_norm", "self_attn.k_norm", "mlp.down_proj"):
            made[f"{here}{name}.weight"] = stack(raw, f"{here}{name}.weight")
        for name in ("input_layernorm", "post_attention_layernorm"):
            made[f"{here}{name}.weight"] = stack(raw, f"{here}{name}.weight")
    return made


def expected_context(raw: dict[str, np.ndarray], depth: int, part: str) -> np.ndarray:
    names = [f"layers.{i}.self_attn.{p}_proj.{part}" for i in range(depth) for p in "kv"]
    return stack(raw, *names)


@pytest.mark.parametrize("folder", [DEMO, *GOLDEN], ids=lambda path: path.name)
def test_published_pairs_convert_to_the_stacked_tensors(folder: Path) -> None:
    target = read_target(folder / "target")
    draft = share_with_target(read_draft(folder / "draft", target), target)
    assert not target.warnings + draft.warnings
    assert not draft.config.own_embedding
    assert not draft.config.own_head
    for source, load in ((target, load_target_params), (draft, load_draft_params)):
        raw_file = load_file(source.folder / "model.safetensors")
        raw = {canonical(name): tensor for name, tensor in raw_file.items()}
        depth = source.config.layers.num_layers
        expected = expected_layers(raw, depth)
        expected |= {n: stack(raw, n) for n in raw if "layers." not in n}
        if source is draft:
            expected = {n: x for n, x in expected.items() if n not in ("embed_tokens.weight",)}
            expected.pop("lm_head.weight", None)
            expected["context_kv.weight"] = expected_context(raw, depth, "weight")
            if source.config.layers.qkv_bias:
                expected["context_kv.bias"] = expected_context(raw, depth, "bias")
        params = load(source, "float32")  # type: ignore[operator]
        assert len(jax.tree.leaves(params)) == len(expected)
        for name, value in expected.items():
            np.testing.assert_array_equal(leaf(params, name), value, err_msg=name)


def test_bytes_are_known_before_any_weight_is_read(tmp_path: Path) -> None:
    pair = TinyPair()
    target = read_target(write_target(tmp_path / "t", pair))
    draft = read_draft(write_draft(tmp_path / "d", pair), target)
    for dtype in ("float32", "bfloat16"):
        for source, load in ((target, load_target_params), (draft, load_draft_params)):
            params = load(source, dtype)  # type: ignore[operator]
            assert sum(x.nbytes for x in jax.tree.leaves(params)) == param_bytes(source, dtype)


@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_stored_dtypes_mean_the_same_numbers(tmp_path: Path, stored: Any, dtype: Any) -> None:
    pair = TinyPair(depth=2)
    tree, tensors = target_files(pair)
    save_json(tmp_path / "config.json", tree)
    save_tensors(tmp_path / "model.safetensors", tensors, np.dtype(stored))
    params = load_target_params(read_target(tmp_path), dtype)
    for name in ("norm.weight", "lm_head.weight"):
        assert str(leaf(params, name).dtype) == dtype
        cast = pair.target[name].astype(stored).astype(leaf(params, name).dtype)
        np.testing.assert_array_equal(leaf(params, name), cast)


def test_rounding_to_bfloat16_is_to_nearest_even(tmp_path: Path) -> None:
    pair = TinyPair(depth=2)
    tree, tensors = target_files(pair)
    exact = np.random.default_rng(1).normal(size=(64, 32)).astype(np.float32)
    save_json(tmp_path / "config.json", tree)
    save_tensors(tmp_path / "model.safetensors", tensors | {"lm_head.weight": exact})
    params = load_target_params(read_target(tmp_path), "bfloat16")
    np.testing.assert_array_equal(
        leaf(params, "lm_head.weight"), np.asarray(jax.numpy.asarray(exact, "bfloat16"))
    )


def test_shards_are_read_as_the_index_says(tmp_path: Path) -> None:
    pair = TinyPair()
    tree, tensors = target_files(pair)
    whole = load_target_params(read_target(write_target(tmp_path / "one", pair)), "float32")
    folder = tmp_path / "many"
    save_json(folder / "config.json", tree)
    save_shards(folder, tensors, 3)
    strays = {"model.safetensors": {"x": np.zeros(3)}, "consolidated.safetensors": tensors}
    for name, held in strays.items():
        save_tensors(folder / name, held)
    (folder / "pytorch_model.bin").write_bytes(b"never opened")
    source = read_target(folder)
    assert [e.name for e in source.ignored] == sorted([*strays, "pytorch_model.bin"])
    parts = load_target_params(source, "float32")
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(parts), strict=True):
        np.testing.assert_array_equal(a, b)


def test_progress_counts_to_the_total(tmp_path: Path) -> None:
    pair = TinyPair()
    target = read_target(write_target(tmp_path / "t", pair))
    draft = read_draft(write_draft(tmp_path / "d", pair), target)
    for source, load in ((target, load_target_params), (draft, load_draft_params)):
        seen: list[tuple[int, int]] = []
        load(source, "float32", lambda *count, seen=seen: seen.append(count))  # type: ignore[operator]
        assert seen[-1] == (param_bytes(source, "float32"),) * 2
        assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_tensors_above_one_chunk_are_read_whole(tmp_path: Path) -> None:
    rows = CHUNK // 32 + 7  # in float32 four chunks and a rest
    pair = TinyPair(depth=2, vocab=rows, mask=1)
    values = np.arange(rows * 32, dtype=np.float32).reshape(rows, 32) % 251
    pair.target["embed_tokens.weight"] = values.astype(ml_dtypes.bfloat16)
    target = read_target(write_target(tmp_path, pair))
    for dtype in ("float32", "bfloat16"):
        params = load_target_params(target, dtype)
        np.testing.assert_array_equal(
            leaf(params, "embed_tokens.weight").astype(np.float32), values
        )
    late = np.array(pair.target["embed_tokens.weight"])
    late[-1, -1] = np.nan
    pair.target["embed_tokens.weight"] = late
    broken = read_target(write_target(tmp_path, pair))
    for check in (scan, lambda s: load_target_params(s, "float32")):
        with pytest.raises(
            CheckpointError, match=r"embed_tokens.weight in model.safetensors: holds"
        ):
            check(broken)


def test_all_problems_come_together_with_tensor_and_file(tmp_path: Path) -> None:
    pair = TinyPair()
    tree, tensors = target_files(pair)
    tensors.pop("model.layers.3.mlp.up_proj.weight")
    tensors["model.layers.1.self_attn.o_proj.weight"] = pair.array(32, 16)
    tensors["model.extra.weight"] = pair.array(4)
    tensors["norm.weight"] = pair.array(32)
    save_json(tmp_path / "config.json", tree)
    save_shards(tmp_path, tensors, 2)
    with pytest.raises(CheckpointError) as caught:
        read_target(tmp_path)
    problems = caught.value.problems
    assert len(problems) == 4
    words = ("layers.3.mlp.up_proj.weight: missing", "shape [32, 16]", "unknown tensor", "dupl")
    for word in words:
        hit = [p for p in problems if word in p]
        assert hit, (word, problems)
        assert "the weight files" in hit[0] or ".safetensors" in hit[0]


def test_unknown_and_missing_names_of_a_plan_are_impossible() -> None:
    target = read_target(DEMO / "target")
    draft = read_draft(DEMO / "draft", target)
    assert set(target_plan(target.config)) == set(target.plan)
    assert set(draft_plan(draft.config)) == set(draft.plan)


@pytest.mark.parametrize(
    ("generation", "config", "token", "expected"),
    [
        ([5, 6, 5], 7, "b", (5, 6)),
        (5, [7], "b", (5,)),
        (None, [7, 8], "b", (7, 8)),
        (None, None, "b", (1,)),
        (None, None, {"content": "<end>"}, (9,)),
        (None, None, None, ()),
    ],
)
def test_stop_ids_come_from_generation_config_then_config_then_tokenizer(
    tmp_path: Path, generation: Any, config: Any, token: Any, expected: tuple[int, ...]
) -> None:
    save_json(tmp_path / "generation_config.json", {"eos_token_id": generation})
    save_json(tmp_path / "config.json", {"eos_token_id": config})
    save_json(tmp_path / "tokenizer_config.json", {"eos_token": token})
    added = [{"id": 9, "content": "<end>"}]
    vocab = {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": added}
    save_json(tmp_path / "tokenizer.json", vocab)
    assert stop_token_ids(tmp_path) == expected


@pytest.mark.parametrize("wrong", [-1, True, "2", [1, None], list(range(65)), 1.0])
def test_malformed_stop_ids_are_named(tmp_path: Path, wrong: Any) -> None:
    save_json(tmp_path / "generation_config.json", {"eos_token_id": wrong})
    with pytest.raises(CheckpointError, match=r"generation_config.json: eos_token_id"):
        stop_token_ids(tmp_path)


def test_token_files_are_copied(tmp_path: Path) -> None:
    source, target = tmp_path / "a", tmp_path / "b"
    save_json(source / "tokenizer.json", {})
    save_json(source / "model.safetensors.index.json", {})
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool.jinja").write_text("x")
    target.mkdir()
    names = copy_token_files(source, target)
    assert names == ["tokenizer.json", "additional_chat_templates/tool.jinja"]
    assert (target / "additional_chat_templates" / "tool.jinja").read_text() == "x"
