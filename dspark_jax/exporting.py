"""Write a pair as one artefact for every accelerator: StableHLO programs and their weights.

Programs run the reference path, which every platform compiles. A state crosses their boundary as
the plain list of its arrays: nothing that knows the networks is needed to hold one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import export
from safetensors.flax import save_file

from convert.tokens import copy_token_files
from dspark_jax import decode
from dspark_jax.config import ModelConfig
from dspark_jax.exported import (
    HEADER,
    PLATFORMS,
    VERSION,
    WEIGHTS,
    ExportError,
    check_export,
    digest,
    program_file,
)
from dspark_jax.request import SamplingParams
from dspark_jax.rows import row_settings
from dspark_jax.state import Params

Program = tuple[Callable[..., Any], tuple[Any, ...]]  # a pure function, shapes of its arguments


def export_pair(
    folder: str | Path,
    config: ModelConfig,
    params: Params,
    *,
    batch: int,
    platforms: Sequence[str] = PLATFORMS,
    stop_ids: Sequence[int] = (),
    token_files: str | Path | None = None,
) -> None:
    """Write the programs of `batch` slots for some platforms, and the weights, into a new folder.

    `config.decode` settles everything static but the two tiers of rounds, greedy and sampled.
    None of the platforms need be present. The tokenizer comes from the folder `token_files`. The
    header is written last, so that a folder with one is complete. Raises ExportError as
    `check_export` does, and where it cannot be written.
    """
    check_export(folder, platforms)
    try:
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        if token_files is not None:
            copy_token_files(Path(token_files), folder)
        _write(folder, config, params, batch, platforms, stop_ids)
    except OSError as error:
        raise ExportError(f"{folder} cannot be written ({error.strerror})") from None


def _write(
    folder: Path,
    config: ModelConfig,
    params: Params,
    batch: int,
    platforms: Sequence[str],
    stop_ids: Sequence[int],
) -> None:
    convention, texts = 0, {}
    for name, (function, arguments) in _programs(config, batch, params).items():
        program = export.export(jax.jit(function), platforms=tuple(platforms))(*arguments)
        texts[name] = bytes(program.serialize())
        program_file(folder, name).write_bytes(texts[name])
        convention = program.calling_convention_version
    save_file(_by_name(params), folder / WEIGHTS)
    header = {
        "version": VERSION,
        "jax": jax.__version__,
        "calling_convention": convention,
        "platforms": list(platforms),
        "batch": batch,
        "dtype": config.dtype,
        "max_length": config.decode.max_length,
        "prefill_chunk": config.decode.prefill_chunk,
        "vocab_size": config.target.vocab_size,
        "stop_token_ids": list(stop_ids),
    }
    header["sha256"] = digest(header, texts)
    (folder / HEADER).write_text(json.dumps(header, indent=2) + "\n")


def _by_name(params: Params) -> dict[str, Any]:
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }


def _programs(config: ModelConfig, batch: int, params: Params) -> dict[str, Program]:
    """What an artefact holds, by name. Weights come as a dict by dotted name."""
    greedy, sampled = (
        replace(config, decode=replace(config.decode, implementation="xla", sampled=drawn))
        for drawn in (False, True)
    )
    weights, weights_tree = jax.tree.flatten(params)
    names = list(_by_name(params))
    empty = partial(decode.init_state, sampled, batch)
    state, state_tree = jax.tree.flatten(jax.eval_shape(empty))
    row, row_tree = jax.tree.flatten(row_settings(1, SamplingParams()))

    def nested(weights: dict[str, Any]) -> Params:
        return jax.tree.unflatten(weights_tree, [weights[name] for name in names])

    def start() -> list[Any]:
        return jax.tree.leaves(empty())

    def admit(state: list[Any], slot: Any, row: list[Any]) -> list[Any]:
        rows = jax.tree.unflatten(state_tree, state)
        settings = jax.tree.unflatten(row_tree, row)
        return jax.tree.leaves(decode.admit(sampled, rows, slot, settings))

    def prefill(weights: dict[str, Any], state: list[Any], *prompt: Any) -> tuple[list[Any], Any]:
        rows = jax.tree.unflatten(state_tree, state)
        after, first = decode.prefill(sampled, nested(weights), rows, *prompt)
        return jax.tree.leaves(after), first.token

    def rounds(
        config: ModelConfig, weights: dict[str, Any], state: list[Any], count: Any
    ) -> tuple[list[Any], Any, Any]:
        rows = jax.tree.unflatten(state_tree, state)
        after, out = decode.decode_rounds(config, nested(weights), rows, count)
        return jax.tree.leaves(after), out.tokens, out.counts

    shapes = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in zip(names, weights, strict=True)
    }
    number, flag = np.int32(0), np.bool_(False)
    chunk = np.zeros(config.decode.prefill_chunk, np.int32)
    return {
        "start": (start, ()),
        "admit": (admit, (state, number, row)),
        "prefill": (prefill, (shapes, state, number, chunk, number, flag)),
        "rounds_greedy": (partial(rounds, greedy), (shapes, state, number)),
        "rounds_sampled": (partial(rounds, sampled), (shapes, state, number)),
    }
