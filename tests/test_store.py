"""A store gives back, bit for bit, what was saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from convert import CheckpointError
from convert.__main__ import main
from convert.apply import load_draft_params, load_target_params
from convert.packaging import read_draft, read_target, share_with_target
from convert.store import abstract_params, is_store, read_store, restore, save
from convert.tokens import stop_token_ids
from tests.checkpoints import save_json, write_draft, write_reduced, write_target
from tests.test_packaging import assert_same_trees
from tests.tiny_pair import TinyPair

DEMO = Path("dspark_jax/demo")
GOLDEN = Path("tests/golden")


def convert(tmp_path: Path, pair: Path, dtype: Any) -> tuple[Any, Any, Any]:
    target = read_target(pair / "target")
    draft = share_with_target(read_draft(pair / "draft", target), target)
    params = {
        "target": load_target_params(target, dtype),
        "draft": load_draft_params(draft, dtype),
    }
    save(tmp_path / "store", params, target.config, draft.config, token_files=target.folder)
    return params, target, draft


@pytest.mark.parametrize("pair", [DEMO, GOLDEN / "bias_mha", GOLDEN / "yarn"], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_store_restores_the_same_parameters_and_settings(
    tmp_path: Path, pair: Path, dtype: str
) -> None:
    params, target, draft = convert(tmp_path, pair, dtype)
    restored, header = restore(tmp_path / "store")
    assert_same_trees(params, restored)
    assert (header.target, header.draft, header.dtype) == (target.config, draft.config, dtype)
    assert header.stop_token_ids == stop_token_ids(target.folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        if (target.folder / name).exists():
            assert (tmp_path / "store" / name).read_bytes() == (target.folder / name).read_bytes()


def test_a_reduced_vocabulary_survives(tmp_path: Path) -> None:
    pair, kept = TinyPair(), np.array([0, 3, 5, 9, 17, 60])
    write_target(tmp_path / "target", pair)
    write_reduced(tmp_path / "draft", pair, kept)
    convert(tmp_path, tmp_path, "bfloat16")
    restored, _ = restore(tmp_path / "store", dtype="float32")
    assert restored["draft"]["draft_to_target"].dtype == "int32"
    np.testing.assert_array_equal(restored["draft"]["draft_to_target"], kept)


def test_another_dtype_is_a_cast_and_the_draft_can_stay_away(tmp_path: Path) -> None:
    params, _, _ = convert(tmp_path, DEMO, "bfloat16")
    wide, _ = restore(tmp_path / "store", dtype="float32")
    assert_same_trees(jax.tree.map(lambda x: x.astype("float32"), params), wide)
    alone, header = restore(tmp_path / "store", draft=False)
    assert list(alone) == ["target"]
    assert header.draft is not None
    assert_same_trees(params["target"], alone["target"])


def test_a_tree_of_shardings_is_followed(tmp_path: Path) -> None:
    convert(tmp_path, GOLDEN / "vanilla", "float32")
    mesh = jax.make_mesh((1,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    placed = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("model"))
    header = read_store(tmp_path / "store")
    tree = jax.tree.map(lambda _: placed, abstract_params(header, "float32"))
    for sharding in (placed, tree):
        restored, _ = restore(tmp_path / "store", sharding=sharding)
        assert {x.sharding for x in jax.tree.leaves(restored)} == {placed}


def test_a_target_alone_makes_a_store(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target", TinyPair())
    out = str(tmp_path / "store")
    assert main(["--target", str(target), "--out", out]) == 0
    restored, header = restore(out)
    assert header.draft is None
    assert list(restored) == ["target"]
    assert header.origin == {"target": str(target), "draft": None, "warnings": []}
    assert header.dtype == "bfloat16"


def test_the_command_writes_what_the_library_loads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = TinyPair()
    folders = write_target(tmp_path / "t", pair), write_draft(tmp_path / "d", pair, "torchspec")
    arguments = ["--target", str(folders[0]), "--draft", str(folders[1]), "--block-size", "5"]
    assert main([*arguments, "--out", str(tmp_path / "store"), "--dtype", "float32"]) == 0
    output = capsys.readouterr()
    assert output.out == ""
    assert "wrote" in output.err
    assert is_store(tmp_path / "store")
    restored, header = restore(tmp_path / "store")
    assert header.draft is not None
    assert header.draft.block_size == 5
    target = read_target(folders[0])
    assert_same_trees(load_target_params(target, "float32"), restored["target"])
    assert main([*arguments, "--out", str(tmp_path / "store")]) == 2
    assert "not an empty folder" in capsys.readouterr().err


def damage(folder: Path, **changes: Any) -> None:
    path = folder / "dspark_store.json"
    save_json(path, json.loads(path.read_text()) | changes)


def test_damaged_stores_are_refused_in_a_sentence(tmp_path: Path) -> None:
    convert(tmp_path, GOLDEN / "vanilla", "float32")
    folder = tmp_path / "store"
    tree = json.loads((folder / "dspark_store.json").read_text())
    narrow = tree["target"] | {"layers": tree["target"]["layers"] | {"intermediate_size": 40}}
    cases = [
        ({"version": 2}, "version 2, this program reads 1"),
        ({"dtype": "int8"}, "dtype int8"),
        ({"target": {"layers": 3}}, "convert the checkpoint again"),
        ({"target": tree["target"] | {"new": 1}}, "new"),
        ({"draft": []}, "convert the checkpoint again"),
        ({"target": narrow}, "target.layers.0.mlp.down_proj.weight: stored with shape"),
    ]
    for changes, words in cases:
        save_json(folder / "dspark_store.json", tree | changes)
        with pytest.raises(CheckpointError) as caught:
            restore(folder)
        assert words in str(caught.value)
    (folder / "dspark_store.json").write_text("{")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        restore(folder)
    (folder / "dspark_store.json").unlink()
    assert not is_store(folder)
    with pytest.raises(CheckpointError, match="not a complete store"):
        restore(folder)
