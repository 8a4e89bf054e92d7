"""One artefact for every accelerator: what it holds, where it runs, what it refuses."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax import export
from safetensors.numpy import load_file, save_file

from convert.__main__ import main
from dspark_jax import SamplingParams, load, load_exported
from dspark_jax.exported import DONATED, PLATFORMS, ExportedPair, ExportError
from tests.checkpoints import write_draft, write_target
from tests.run_exported import BATCHES, PROMPTS
from tests.tiny import quick_compilation
from tests.tiny_pair import TinyPair

MODEL_CODE = {f"dspark_jax.{name}" for name in ("layers", "target", "draft", "decode")}


@pytest.fixture(autouse=True, scope="module")
def compile_quickly():
    with quick_compilation():
        yield


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    tiny = TinyPair(depth=3, draft_depth=1, taps=(0, 1))
    return write_target(folder / "target", tiny), write_draft(folder / "draft", tiny, "deepspec")


@pytest.fixture(scope="module")
def exported(pair: tuple[Path, Path]) -> Path:
    """The pair, exported for all platforms by the command."""
    out = pair[0].parent / "exported"
    flags = ["--dtype", "float32", "--max-length", "64", "--batch", "2"]
    names = ["--target", str(pair[0]), "--draft", str(pair[1])]
    assert main([*names, *flags, "--export-stablehlo", str(out)]) == 0
    return out


def test_a_process_without_the_networks_emits_the_same(
    pair: tuple[Path, Path], exported: Path
) -> None:
    """Greedy and mixed batches, in two turns of two slots, token for token and round for round."""
    command = [sys.executable, "-m", "tests.run_exported", str(exported)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert not MODEL_CODE & set(found["modules"])
    assert not [name for name in found["modules"] if name.startswith("pallas_kernels.")]
    options: dict[str, Any] = {"max_length": 64, "max_batch": 4, "report": lambda line: None}
    engine = load(*pair, dtype="float32", prefill_chunk=16, **options)
    assert set(sys.modules) >= MODEL_CODE  # the search for them finds them
    for batch, params in zip(found["results"], BATCHES, strict=True):
        results = engine.generate(PROMPTS, params)
        assert batch == [[one.token_ids, one.acceptance_lengths] for one in results]


def test_every_program_is_lowered_for_every_platform(exported: Path) -> None:
    for name in ("start", *DONATED):
        text = bytearray((exported / f"{name}.stablehlo").read_bytes())
        program = export.deserialize(text)
        assert program.platforms == PLATFORMS
        assert program.nr_devices == 1
        assert "mosaic" not in str(program.mlir_module())


def changed(exported: Path, place: Path, **header: Any) -> Path:
    """A copy of an artefact with another header."""
    shutil.copytree(exported, place)
    tree = json.loads((place / "export.json").read_text()) | header
    (place / "export.json").write_text(json.dumps(tree))
    return place


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ({"version": 1}, "is of version 1, this program reads 2; export it again"),
        ({"jax": "99.0.0"}, "by jax 99.0.0, which is newer than the jax .* that runs; install jax"),
        ({"calling_convention": 3}, "calling convention 3, and jax .* reads .* export it again"),
        ({"platforms": ["cuda", "tpu"]}, "for cuda, tpu, and this process runs on cpu; export it"),
        ({"jax": None}, "export.json is damaged"),
        ({"calling_convention": "x"}, "export.json is damaged"),
        ({"platforms": "cpu"}, "export.json is damaged"),
        ({"batch": 4}, "its programs and settings were not written together"),
        ({"prefill_chunk": 8}, "its programs and settings were not written together"),
    ],
)
def test_what_cannot_run_here_is_a_sentence(
    exported: Path, tmp_path: Path, header: dict[str, Any], words: str
) -> None:
    with pytest.raises(ExportError, match=words) as caught:
        load_exported(changed(exported, tmp_path / "copy", **header))
    assert "\n" not in str(caught.value)


def test_incomplete_and_damaged_artefacts_are_sentences(exported: Path, tmp_path: Path) -> None:
    copy = changed(exported, tmp_path / "copy")
    program = (copy / "prefill.stablehlo").read_bytes()
    (copy / "prefill.stablehlo").write_bytes(program[: len(program) // 2])
    with pytest.raises(ExportError, match=r"were not written together\); export it again"):
        load_exported(copy)
    (copy / "prefill.stablehlo").unlink()
    with pytest.raises(ExportError, match="cannot be read"):
        load_exported(copy)
    (copy / "prefill.stablehlo").write_bytes(program)
    (copy / "weights.safetensors").write_bytes(b"\0" * 20)
    with pytest.raises(ExportError, match="cannot be read"):
        load_exported(copy)
    (copy / "export.json").unlink()
    with pytest.raises(ExportError, match=r"holds no export\.json: not a complete export"):
        load_exported(copy)


def test_another_exports_programs_are_refused(exported: Path, tmp_path: Path) -> None:
    """Greedy rounds under the name of sampled ones would run, and not sample."""
    copy = changed(exported, tmp_path / "copy")
    shutil.copy(copy / "rounds_greedy.stablehlo", copy / "rounds_sampled.stablehlo")
    with pytest.raises(ExportError, match="were not written together"):
        load_exported(copy)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda held: {"other": next(iter(held.values()))}, "and the programs differ in other"),
        (lambda held: {"target.norm.weight": np.ones(3, np.float32)}, r"as float32\[3\], the"),
        (lambda held: {name: x.astype(np.float16) for name, x in held.items()}, "as float16"),
    ],
)
def test_weights_that_the_programs_do_not_take_are_refused(
    exported: Path, tmp_path: Path, change: Any, words: str
) -> None:
    copy = changed(exported, tmp_path / "copy")
    held = load_file(copy / "weights.safetensors")
    save_file(held | change(held), copy / "weights.safetensors")
    with pytest.raises(ExportError, match=words):
        load_exported(copy)


def test_the_tokenizers_stop_token_where_files_name_none(exported: Path) -> None:
    """As `load` does: a text must not run on because it was exported."""

    class Held:
        stop_ids = (5,)

    pair = load_exported(exported)
    header = json.loads((exported / "export.json").read_text()) | {"stop_token_ids": []}
    silent = ExportedPair(header, pair._programs, pair._weights, Held())  # type: ignore[arg-type]
    assert silent._intake.stop_ids == (5,)
    assert pair._intake.stop_ids == (3, 7)


def test_what_is_not_exported_is_refused(exported: Path) -> None:
    pair = load_exported(exported)
    for controls in ({"logprobs": 1}, {"presence_penalty": 0.5}):
        with pytest.raises(ValueError, match="logit controls or log-probabilities"):
            pair.generate([[1, 2]], SamplingParams(max_tokens=8, **controls))
    with pytest.raises(ValueError, match="above max_length 64"):
        pair.generate([[1, 2]], SamplingParams(max_tokens=63))


def test_the_command_refuses_before_it_reads(
    pair: tuple[Path, Path],
    exported: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def read(*_: Any) -> None:
        raise AssertionError("a weight was read")

    monkeypatch.setattr("convert.__main__.load_target_params", read)
    target = ["--target", str(pair[0])]
    for flags, words in (
        (
            ["--export-stablehlo", "x", "--platforms", "cpu,metal"],
            "rocm, tpu, got metal",
        ),
        (["--export-stablehlo", str(exported)], "exists and is not an empty folder"),
        (["--out", str(exported)], "exists and is not an empty folder"),
        (["--out", "x" * 300], "cannot be written: File name too long"),
        (["--export-stablehlo", "x", "--max-length", "1"], "max_length must be at least 2, got 1"),
    ):
        assert main([*target, *flags]) == 2
        err = capsys.readouterr().err
        assert err.startswith("error: ")
        assert err.count("\n") == 1
        assert words in err
    assert not Path("x").exists()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--out", "x", "--platforms", "cpu"], "go with --export-stablehlo"),
        (["--check", "--batch", "2"], "go with --export-stablehlo"),
        (["--out", "x", "--export-stablehlo", "./x"], "both name x: give each its own folder"),
        (["--check", "--export-stablehlo", ""], "is empty: name a folder"),
    ],
)
def test_flags_that_do_not_go_together(
    pair: tuple[Path, Path], flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--target", str(pair[0]), *flags])
    err = capsys.readouterr().err
    assert (caught.value.code, err.count("\n")) == (2, 1)
    assert words in err
    assert not Path("x").exists()


def test_the_header_is_written_last(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk while tokenizer files are copied leaves no export that looks complete."""

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("dspark_jax.exporting.copy_token_files", full)
    out = tmp_path / "out"
    flags = ["--platforms", "cpu", "--max-length", "64", "--export-stablehlo", str(out)]
    assert main(["--target", str(pair[0]), *flags]) == 2
    assert not (out / "export.json").exists()


def test_a_target_alone_is_plain_decoding(pair: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "plain"
    flags = ["--dtype", "float32", "--max-length", "64", "--platforms", jax.default_backend()]
    assert main(["--target", str(pair[0]), *flags, "--export-stablehlo", str(out)]) == 0
    params = SamplingParams(max_tokens=8)
    (found,) = load_exported(out).generate([PROMPTS[0]], params)
    engine = load(pair[0], dtype="float32", max_length=64, report=lambda line: None)
    assert found.token_ids == engine.generate([PROMPTS[0]], params)[0].token_ids
