"""A plan and a reader -> parameters; the only place where weights are read.

Each parameter is assembled in one host buffer and handed to the device at once, so the peak is
the weights, one parameter and a small scratch. On a CPU the buffer itself becomes the array.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import ml_dtypes
import numpy as np

from convert.headers import Tensor
from convert.names import MAPS, Parameter
from convert.problems import raise_problems
from convert.reader import chunks, equal_tensors, is_finite, read_into
from convert.sources import DraftSource, Source, TargetSource

Dtype = Literal["float32", "bfloat16"]
Progress = Callable[[int, int], None]
Params = dict[str, Any]
Place = Callable[[str, np.ndarray], jax.Array]  # a parameter's name and host buffer -> device
DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
ALIGNMENT = 64  # what the CPU backend needs to take a buffer over without a copy


def param_bytes(source: Source, dtype: Dtype) -> int:
    """Return the bytes of the loaded parameters in `dtype`, from the plan alone."""
    size = DTYPES[dtype].itemsize
    return sum(entry.size * (4 if name in MAPS else size) for name, entry in source.plan.items())


def load_target_params(
    source: TargetSource,
    dtype: Dtype,
    progress: Progress | None = None,
    place: Place | None = None,
) -> Params:
    """Read the target's parameters as a nested dict, onto the default device or as `place` says.

    `progress(done, total)` counts loaded bytes. Raises CheckpointError with every tensor that is
    not finite, and where a stored head differs from the embedding it is tied to.
    """
    return _load(source, dtype, progress, place or _on_default_device)


def load_draft_params(
    source: DraftSource,
    dtype: Dtype,
    progress: Progress | None = None,
    place: Place | None = None,
) -> Params:
    """Read the draft's parameters as a nested dict, onto the default device or as `place` says.

    An embedding or head that `source.config` does not own is left out: the target's serves.
    `draft_to_target` holds absolute target ids. Raises as `load_target_params` does.
    """
    return _load(source, dtype, progress, place or _on_default_device)


def _on_default_device(name: str, buffer: np.ndarray) -> jax.Array:
    return jax.device_put(buffer)


def _load(source: Source, dtype: Dtype, progress: Progress | None, place: Place) -> Params:
    problems = _held_against(source)
    raise_problems(problems, str(source.folder))
    total, done = param_bytes(source, dtype), 0
    params: Params = {}

    def report(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, total)

    for name, entry in source.plan.items():
        if name in MAPS:
            buffer = _target_ids(source.tensors["d2t"], entry)
            report(buffer.nbytes)
        else:
            buffer = _assemble(source.tensors, entry, DTYPES[dtype], report, problems)
        if not problems:  # after a problem the rest is only checked
            put(params, name, jax.block_until_ready(place(name, buffer)))
        del buffer
    raise_problems(problems, str(source.folder))
    return params


def _assemble(
    tensors: Mapping[str, Tensor],
    entry: Parameter,
    dtype: np.dtype,
    report: Callable[[int], None],
    problems: list[str],
) -> np.ndarray:
    """Stack the pieces of one parameter in one buffer."""
    buffer, row = _aligned(entry.shape, dtype), 0
    if not entry.pieces:
        buffer[...] = 0
        report(buffer.nbytes)
    for piece in entry.pieces:
        rows = piece.shape[0]
        tensor = tensors[piece.source]
        if not read_into(tensor, buffer[row : row + rows], report):
            problems.append(f"{tensor}: holds NaN or infinity")
        row += rows
    return buffer


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    count = int(np.prod(shape)) * dtype.itemsize
    raw = np.empty(count + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + count].view(dtype).reshape(shape)


def put(params: Params, name: str, value: Any) -> None:
    """Set a leaf of a nested dict by its dotted name."""
    *folders, leaf = name.split(".")
    for folder in folders:
        params = params.setdefault(folder, {})
    params[leaf] = value


def _target_ids(tensor: Tensor, entry: Parameter) -> np.ndarray:
    """Return absolute target ids: the file holds offsets from the draft id."""
    rows = entry.shape[0]
    offsets = np.concatenate([np.array(piece, np.int64) for piece in chunks(tensor, rows)])
    return (offsets + np.arange(rows)).astype(np.int32)


def _held_against(source: Source) -> list[str]:
    """Check the tensors that are not loaded because another must equal them, and the map."""
    problems = []
    if isinstance(source, TargetSource) and source.tied_head is not None:
        embedding = source.tensors["embed_tokens.weight"]
        if not equal_tensors(source.tied_head, embedding):
            problems.append(
                f"{source.tied_head}: differs from {embedding}, although tie_word_embeddings is"
                " true; set it to false if the head is real"
            )
    if isinstance(source, DraftSource):
        problems += _map_problems(source)
    return problems


def _map_problems(source: DraftSource) -> list[str]:
    config = source.config
    if source.identity_map is not None and any(p.any() for p in chunks(source.identity_map)):
        return [f"{source.identity_map}: moves ids, although the draft's vocabulary is whole"]
    if not config.reduced_vocabulary:
        return []
    rows = config.draft_vocab_size
    pieces = [np.array(piece, np.int64) for piece in chunks(source.tensors["d2t"], rows)]
    ids = np.concatenate(pieces) + np.arange(rows)
    if ids.min() < 0 or ids.max() >= config.vocab_size:
        return [
            f"{source.tensors['d2t']}: leads outside the target's {config.vocab_size} ids (it must"
            " hold offsets from the draft id)"
        ]
    if len(np.unique(ids)) != rows:
        return [f"{source.tensors['d2t']}: two draft ids lead to one target id"]
    return []


def scan(source: Source, progress: Progress | None = None) -> None:
    """Read every weight once and keep nothing: raise what loading would raise."""
    problems = _held_against(source)
    pieces = [piece for entry in source.plan.values() for piece in entry.pieces]
    rows = {piece.source: piece.shape[0] for piece in pieces if piece.source not in MAPS}
    total, done = sum(source.tensors[name].nbytes for name in rows), 0
    for name in sorted(rows):
        finite = True
        for piece in chunks(source.tensors[name], rows[name]):
            finite = finite and is_finite(piece)
            done += piece.nbytes
            if progress is not None:
                progress(done, total)
        if not finite:
            problems.append(f"{source.tensors[name]}: holds NaN or infinity")
    raise_problems(problems, str(source.folder))
