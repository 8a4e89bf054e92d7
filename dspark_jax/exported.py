"""Run an exported pair: the programs that were written, and nothing that knows the networks.

DIR/export.json          version, jax, platforms, settings, digest of itself and the programs
DIR/PROGRAM.stablehlo    what `jax.export` serialized
DIR/weights.safetensors  parameters by dotted name
DIR/tokenizer.json ...   copied from the target's folder
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import export
from safetensors import SafetensorError, safe_open

from dspark_jax.accounting import Request
from dspark_jax.folders import check_unused
from dspark_jax.intake import Intake, Prompt
from dspark_jax.request import Result, SamplingParams
from dspark_jax.rows import prompt_chunks, row_settings
from dspark_jax.state import MAX_ROUNDS
from dspark_jax.text import Tokenizer, open_tokenizer

HEADER, WEIGHTS = "export.json", "weights.safetensors"
VERSION = 2
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
DONATED = {"admit": 0, "prefill": 1, "rounds_greedy": 1, "rounds_sampled": 1}  # the state


class ExportError(ValueError):
    """An artefact that cannot be written or run here, with the remedy."""


def program_file(folder: Path, name: str) -> Path:
    return folder / f"{name}.stablehlo"


def digest(header: Mapping[str, Any], programs: Mapping[str, bytes]) -> str:
    """SHA-256 of the settings and the programs, which run together only."""
    settings = {name: value for name, value in header.items() if name != "sha256"}
    whole = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for name, text in sorted(programs.items()):
        whole.update(f"{name} {len(text)} ".encode() + text)
    return whole.hexdigest()


def check_export(folder: str | Path, platforms: Sequence[str]) -> None:
    """Raise ExportError where a platform is not known or the folder is in use."""
    unknown = [name for name in platforms if name not in PLATFORMS]
    if unknown or not platforms:
        names = ", ".join(unknown) or "none"
        raise ExportError(f"platforms must be some of {', '.join(PLATFORMS)}, got {names}")
    check_unused(folder, ExportError)


def load_exported(folder: str | Path) -> ExportedPair:
    """Load what `python -m convert --export-stablehlo` wrote onto the default device.

    Raises ExportError with one sentence where the folder is incomplete or of another version,
    where a file of it was changed or is of another export, where this jax cannot read it, or where
    it was not exported for this platform.
    """
    if not isinstance(folder, str | Path):
        raise ExportError(f"folder must be a path, got {folder!r}")
    folder = Path(folder)
    header = _read_header(folder)
    platform = export.default_export_platform()
    if platform not in header["platforms"]:
        raise ExportError(
            f"{folder} was exported for {', '.join(header['platforms'])}, and this process runs on"
            f" {platform}; export it again with --platforms {platform}"
        )
    try:
        texts = {name: program_file(folder, name).read_bytes() for name in ("start", *DONATED)}
        if digest(header, texts) != header.get("sha256"):
            raise ValueError("its programs and settings were not written together")
        programs = {name: _deserialize(name, text) for name, text in texts.items()}
        weights = _read_weights(folder / WEIGHTS, programs["prefill"])
    except (OSError, ValueError, SafetensorError) as error:
        raise ExportError(f"{folder} cannot be read ({error}); export it again") from None
    return ExportedPair(header, programs, weights, open_tokenizer(folder))


def _deserialize(name: str, text: bytes) -> export.Exported:
    try:
        return export.deserialize(bytearray(text))
    except Exception as error:  # of whatever reads the bytes
        raise ValueError(f"{name} is no program for this jax: {error}") from None


def _read_weights(file: Path, program: export.Exported) -> dict[str, jax.Array]:
    """The parameters that a program takes first, and no others."""
    (wanted, *_), _ = jax.tree.unflatten(program.in_tree, program.in_avals)
    with safe_open(file, "numpy") as held:
        names = held.keys()
        if wrong := sorted(wanted.keys() ^ set(names)):
            raise ValueError(f"{file.name} and the programs differ in {wrong[0]}")
        found = {}
        for name in names:
            tensor, shape = held.get_tensor(name), wanted[name]
            if (tensor.shape, tensor.dtype) != (shape.shape, shape.dtype):
                raise ValueError(
                    f"{file.name} holds {name} as {tensor.dtype}{list(tensor.shape)}, the programs"
                    f" take {shape.dtype}{list(shape.shape)}"
                )
            found[name] = jax.device_put(tensor)
    return found


def _read_header(folder: Path) -> dict[str, Any]:
    """The header of an artefact that this jax can read."""
    if not (folder / HEADER).is_file():
        raise ExportError(f"{folder} holds no {HEADER}: not a complete export")
    try:
        header = json.loads((folder / HEADER).read_text())
        version, convention = header["version"], int(header["calling_convention"])
        written = tuple(int(part) for part in header["jax"].split(".")[:3])
        if not set(header["platforms"]) <= set(PLATFORMS):
            raise ValueError(f"platforms {header['platforms']}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ExportError(f"{folder / HEADER} is damaged ({error}); export it again") from None
    if version != VERSION:
        raise ExportError(
            f"{folder} is of version {version}, this program reads {VERSION}; export it again"
        )
    if written > jax.__version_info__:
        raise ExportError(
            f"{folder} was exported by jax {header['jax']}, which is newer than the jax"
            f" {jax.__version__} that runs; install jax {header['jax']} or later"
        )
    least = export.minimum_supported_calling_convention_version
    most = export.maximum_supported_calling_convention_version
    if not least <= convention <= most:
        raise ExportError(
            f"{folder} was exported by jax {header['jax']} with calling convention {convention},"
            f" and jax {jax.__version__} reads {least} to {most}; export it again"
        )
    return header


class ExportedPair:
    """An exported target with its draft. Prompts run in turns of as many slots as were exported."""

    def __init__(
        self,
        header: dict[str, Any],
        programs: dict[str, export.Exported],
        weights: dict[str, jax.Array],
        tokenizer: Tokenizer | None,
    ) -> None:
        self.max_batch: int = header["batch"]
        self.tokenizer = tokenizer
        self._chunk: int = header["prefill_chunk"]
        self._weights = weights
        self._intake = Intake(
            header["vocab_size"],
            header["max_length"],
            tokenizer,
            header["stop_token_ids"] or (tokenizer.stop_ids if tokenizer else ()),
        )
        self._programs = programs
        self._compiled: dict[str, Callable[..., Any]] = {}

    def generate(
        self,
        prompts: str | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Result]:
        """Continue prompts; results come in prompt order, and are those of `Engine.generate`.

        Raises ValueError as that does, and for logit controls and log-probabilities, which are not
        exported.
        """
        requests = self._intake.requests(prompts, SamplingParams() if params is None else params)
        for index, request in enumerate(requests):
            if request.params.controlled or request.params.logprobs is not None:
                raise ValueError(
                    f"prompt {index} asks for logit controls or log-probabilities, which an"
                    " exported pair has not; leave them out"
                )
        for begin in range(0, len(requests), self.max_batch):
            self._serve(requests[begin : begin + self.max_batch])
        return [request.result() for request in requests]

    def _run(self, name: str) -> Callable[..., Any]:
        """A program, compiled for the device of this process when it is first wanted."""
        if name not in self._compiled:
            program = self._programs[name]
            arguments, _ = jax.tree.unflatten(program.in_tree, program.in_avals)
            call = jax.jit(program.call, donate_argnums=DONATED.get(name, ()))
            self._compiled[name] = call.lower(*arguments).compile()
        return self._compiled[name]

    def _serve(self, turn: Sequence[Request]) -> None:
        greedy = all(request.params.greedy for request in turn)
        names = ("start", "admit", "prefill", "rounds_greedy" if greedy else "rounds_sampled")
        start, admit, prefill, rounds = map(self._run, names)
        state, firsts = start(), []
        for slot, request in enumerate(turn):
            request.start()
            state = admit(state, np.int32(slot), _row(request))
            for chunk in prompt_chunks(request.prompt_ids, self._chunk):
                state, first = prefill(self._weights, state, np.int32(slot), *chunk)
            firsts.append(first)
        for request, token in zip(turn, jax.device_get(firsts), strict=True):
            request.take_first(int(token))
        while any(request.finish_reason is None for request in turn):
            state, tokens, counts = rounds(self._weights, state, np.int32(MAX_ROUNDS))
            tokens, counts = jax.device_get((tokens, counts))
            for slot, request in enumerate(turn):
                _take_rounds(request, tokens[slot], counts[slot])


def _row(request: Request) -> list[Any]:
    row = row_settings(
        len(request.prompt_ids), request.params, seed=request.seed, stop_ids=request.stop_ids
    )
    return jax.tree.leaves(row)


def _take_rounds(request: Request, tokens: np.ndarray, counts: np.ndarray) -> None:
    """Hand a row's rounds to its request; those that did not run have zero counts."""
    for round_tokens, (emitted, accepted, proposed, done) in zip(
        tokens, counts.tolist(), strict=True
    ):
        if emitted:
            request.take_round(round_tokens[:emitted].tolist(), accepted, proposed, bool(done))
