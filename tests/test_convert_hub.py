"""Hub ids through a local cache in the hub's own layout; no network is touched."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants, errors

from convert import CheckpointError, hub
from convert.packaging import read_draft, read_target
from tests.checkpoints import save_shards, target_files, write_draft, write_target
from tests.tiny_pair import TinyPair

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def into_cache(cache: Path, repository: str, folder: Path) -> None:
    """Lay a folder out as huggingface_hub does: blobs, links to them by commit, a ref."""
    root = cache / ("models--" + repository.replace("/", "--"))
    snapshot = root / "snapshots" / COMMIT
    for part in (root / "blobs", root / "refs", snapshot):
        part.mkdir(parents=True)
    (root / "refs" / "main").write_text(COMMIT)
    for number, path in enumerate(sorted(folder.iterdir())):
        shutil.copyfile(path, root / "blobs" / f"{number:040}")
        (snapshot / path.name).symlink_to(Path("..") / ".." / "blobs" / f"{number:040}")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    made = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(made))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return made


def test_a_cached_pair_is_read_offline(cache: Path, tmp_path: Path) -> None:
    pair = TinyPair()
    into_cache(cache, "org/target", write_target(tmp_path / "t", pair))
    into_cache(cache, "org/draft-dspark", write_draft(tmp_path / "d", pair, "specforge"))
    target = read_target(hub.resolve_folder("org/target"))
    assert target.folder.name == COMMIT
    assert read_draft(hub.resolve_folder("org/draft-dspark"), target).config.block_size == 5


def test_a_cached_sharded_checkpoint_is_read_offline(cache: Path, tmp_path: Path) -> None:
    pair = TinyPair()
    folder = write_target(tmp_path / "t", pair)
    (folder / "model.safetensors").unlink()
    names = save_shards(folder, target_files(pair)[1], 2)
    into_cache(cache, "org/target", folder)
    found = hub.resolve_folder("org/target")
    read_target(found)
    (found / names[0]).unlink()
    with pytest.raises(CheckpointError, match=f"{names[0]}: missing"):
        read_target(hub.resolve_folder("org/target"))


def test_the_environment_decides_where_the_cache_is(tmp_path: Path) -> None:
    into_cache(tmp_path / "home" / "hub", "org/target", write_target(tmp_path / "t", TinyPair()))
    command = [sys.executable, "-m", "convert", "--target", "org/target", "--check", "--json"]
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        environment.pop(name, None)
    run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert run.returncode == 0, run.stderr
    assert COMMIT in json.loads(run.stdout)["target"]["folder"]
    run = subprocess.run(
        [*command[:4], "org/other", "--check"],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
    )
    assert run.returncode == 2
    assert "offline mode is on (HF_HUB_OFFLINE)" in run.stderr
    assert "Traceback" not in run.stderr


def test_a_local_folder_wins(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    into_cache(cache, "org/target", write_target(tmp_path / "t", TinyPair()))
    write_target(tmp_path / "org" / "target", TinyPair())
    assert hub.resolve_folder("org/target") == Path("org/target")


@pytest.mark.parametrize("name", ["nothing", "./org/x", "org/x/y", "/org/x", "org/", "o--x", ""])
def test_what_is_neither_folder_nor_id_is_named(cache: Path, name: str) -> None:
    if name in ("",):  # the current folder exists
        assert hub.resolve_folder(name) == Path()
        return
    with pytest.raises(CheckpointError, match="not a hub repository id of the form owner/name"):
        hub.resolve_folder(name)


def test_a_file_is_not_a_folder(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("")
    with pytest.raises(CheckpointError, match="is a file"):
        hub.resolve_folder(tmp_path / "x")


def raising(error: Exception) -> Any:
    def download(*_: Any, **__: Any) -> str:
        raise error

    return download


class Response:
    """What the hub's errors want of a response."""

    status_code, headers, request = 404, {}, None


@pytest.mark.parametrize(
    ("error", "offline", "words"),
    [
        (errors.LocalEntryNotFoundError("x"), False, "the hub cannot be reached"),
        (errors.LocalEntryNotFoundError("x"), True, "offline mode is on"),
        (ConnectionResetError("reset"), False, r"could not be fetched from the hub \(reset\)"),
        (RuntimeError(), False, r"could not be fetched from the hub \(RuntimeError\)"),
        (
            errors.RepositoryNotFoundError("x", response=Response()),  # type: ignore[arg-type]
            False,
            "is no hub repository you can read",
        ),
    ],
)
def test_every_trouble_of_the_network_is_a_sentence(
    cache: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, offline: bool, words: str
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", raising(error))
    with pytest.raises(CheckpointError, match=words) as caught:
        hub.resolve_folder("org/target")
    assert len(str(caught.value)) < 400


def test_only_configs_tokenizer_and_the_indexed_weights_are_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = TinyPair()
    folder = write_target(tmp_path / COMMIT, pair)
    names = save_shards(folder, target_files(pair)[1], 2)
    calls: list[tuple[str | None, list[str]]] = []

    def download(repository: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        calls.append((revision, allow_patterns))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert hub.resolve_folder("org/target") == folder
    (first, small), (second, weights) = calls
    assert (first, second) == (None, COMMIT)
    assert weights == names
    assert not any(p.endswith((".py", ".bin", ".safetensors", "*")) for p in small)
    assert "config.json" in small
