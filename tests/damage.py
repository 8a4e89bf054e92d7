"""Ways to damage a tiny pair on disk, each a function of the folder that holds it."""

from __future__ import annotations

import json
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from convert.__main__ import main
from convert.problems import SHOWN
from tests.checkpoints import (
    save_json,
    save_shards,
    save_tensors,
    target_files,
    write_draft,
    write_target,
)
from tests.dialects import DIALECTS, speculators
from tests.tiny_pair import TinyPair

Damage = Callable[[Path], None]
PAIR = TinyPair()
W1, W2 = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
CONFIDENCE = "confidence_head.proj.weight"
REMOVED = object()
D2T = np.arange(6, dtype=np.int64)


def config(role: str, **changes: Any) -> Damage:
    """Change keys of a config.json; REMOVED takes one out."""

    def damage(folder: Path) -> None:
        path = folder / role / "config.json"
        tree = json.loads(path.read_text()) | changes
        save_json(path, {k: v for k, v in tree.items() if v is not REMOVED})

    return damage


def tensors(role: str, change: Callable[[dict[str, np.ndarray]], Any]) -> Damage:
    """Rewrite the weight file after a change of its tensors."""

    def damage(folder: Path) -> None:
        held = target_files(PAIR)[1] if role == "target" else DIALECTS["deepspec"](PAIR)[1]
        held = {name: np.array(tensor) for name, tensor in held.items()}
        change(held)
        save_tensors(folder / role / "model.safetensors", held)

    return damage


def dialect(name: str, **changes: Any) -> Damage:
    return lambda folder: void(write_draft(folder / "draft", PAIR, name, **changes))


def void(_: Any) -> None:
    return None


def both(*damages: Callable[[Path], Any]) -> Damage:
    """Do one after the other."""
    return lambda folder: void([damage(folder) for damage in damages])


def remove(path: str) -> Damage:
    return lambda folder: (folder / path).unlink()


def move(path: str, new: str) -> Damage:
    return lambda folder: void((folder / path).rename(folder / new))


def pipe(path: str) -> Damage:
    return both(remove(path), lambda folder: os.mkfifo(folder / path))


def append(path: str, content: bytes) -> Damage:
    return lambda folder: void((folder / path).write_bytes((folder / path).read_bytes() + content))


def other_tokenizers(folder: Path) -> None:
    for role in ("target", "draft"):
        vocab = {f"{role}{i}": i for i in range(60)}
        save_json(folder / role / "tokenizer.json", {"model": {"vocab": vocab}})


def put(name: str, *shape: int, dtype: Any = None) -> Callable[[dict[str, np.ndarray]], Any]:
    def change(held: dict[str, np.ndarray]) -> None:
        held[name] = PAIR.array(*shape) if dtype is None else np.zeros(shape, dtype)

    return change


def poison(name: str, value: float) -> Callable[[dict[str, np.ndarray]], Any]:
    return lambda held: held[name].reshape(-1).__setitem__(-1, value)


def drop(*names: str) -> Callable[[dict[str, np.ndarray]], Any]:
    return lambda held: [held.pop(name) for name in names]


def sharded(change: Callable[[Path], None]) -> Damage:
    """Write the target over three files, then damage the folder."""

    def damage(folder: Path) -> None:
        (folder / "target" / "model.safetensors").unlink()
        save_shards(folder / "target", target_files(PAIR)[1], 3)
        change(folder / "target")

    return damage


def edit_index(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / "model.safetensors.index.json"
        tree = json.loads(path.read_text())
        change(tree["weight_map"])
        save_json(path, tree)

    return damage


def header(change: Callable[[dict[str, Any]], Any]) -> Damage:
    """Rewrite the header of the draft's file; the data stay."""

    def damage(folder: Path) -> None:
        path = folder / "draft" / "model.safetensors"
        raw = path.read_bytes()
        length = struct.unpack("<Q", raw[:8])[0]
        tree = json.loads(raw[8 : 8 + length])
        changed = change(tree)
        text = json.dumps(tree) if changed is None else changed
        path.write_bytes(struct.pack("<Q", len(text)) + text.encode() + raw[8 + length :])

    return damage


def entry(name: str, **fields: Any) -> Damage:
    return header(lambda tree: tree[name].update(fields))


def only_pickle(folder: Path) -> None:
    (folder / "draft" / "model.safetensors").unlink()
    with (folder / "draft" / "pytorch_model.bin").open("wb") as file:
        pickle.dump(Bomb(), file)


class Bomb:
    """Unpickling it would end the process."""

    def __reduce__(self) -> Any:
        return os._exit, (3,)


def rewrite(path: str, content: bytes) -> Damage:
    return lambda folder: void((folder / path).write_bytes(content))


def truncated(path: str, size: int) -> Damage:
    return lambda folder: os.truncate(folder / path, size)


def duplicate_header_key(tree: dict[str, Any]) -> str:
    text = json.dumps(tree)
    name = json.dumps("norm.weight")
    return text[:-1] + f", {name}: {json.dumps(tree['norm.weight'])}}}"


def layer(**changes: Any) -> Damage:
    """Change the nested decoder layer of a speculators config."""
    tree = speculators(PAIR)[0]["transformer_layer_config"] | changes
    kept = {k: v for k, v in tree.items() if v is not REMOVED}
    return dialect("speculators", transformer_layer_config=kept)


def nested(**changes: Any) -> Damage:
    tree = DIALECTS["specforge"](PAIR)[0]["dflash_config"] | changes
    kept = {k: v for k, v in tree.items() if v is not REMOVED}
    return dialect("specforge", dflash_config=kept)


def reduced(maps: dict[str, np.ndarray], size: int = 6) -> Damage:
    """A speculators draft with six rows in head and W2, and these maps."""

    def damage(folder: Path) -> None:
        tree, held = speculators(PAIR)
        cut = {"lm_head.weight": PAIR.head()[:6], W2: PAIR.draft[W2][:6]}
        save_json(folder / "draft" / "config.json", tree | {"draft_vocab_size": size})
        held = {k: v for k, v in (held | cut | maps).items() if k != "t2d"}
        save_tensors(folder / "draft" / "model.safetensors", held)

    return damage


def assert_refused(
    folder: Path, damage: Damage, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Check and convert the damaged pair: exit code 2 and a sentence with `words` both times."""
    write_target(folder / "target", PAIR)
    write_draft(folder / "draft", PAIR)
    damage(folder)
    arguments = ["--target", str(folder / "target"), "--draft", str(folder / "draft")]
    assert main([*arguments, "--check", "--json"]) == 2
    output = capsys.readouterr()
    report = json.loads(output.out)
    assert report["verdict"] == "refused"
    assert any(words in problem for problem in report["problems"]), report["problems"]
    assert output.err.startswith("error: ")
    assert main([*arguments, "--out", str(folder / "store")]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.splitlines()[-1].strip()
    assert "error: " in output.err
    assert words in output.err or len(report["problems"]) > SHOWN
    assert not (folder / "store").exists()
