"""Rows of a safetensors file, straight into the buffer that becomes a parameter."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ml_dtypes
import numpy as np

from convert.headers import Tensor
from convert.problems import CheckpointError

CHUNK = 8 << 20  # bytes held beside the destination while a tensor is read
DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
}


@contextmanager
def _open_at(tensor: Tensor) -> Iterator[Callable[[np.ndarray], None]]:
    """Open the tensor's file at its first byte; yields what fills an array with the next bytes."""
    try:
        with tensor.file.open("rb", buffering=0) as file:
            file.seek(tensor.begin)
            yield lambda piece: _fill(file.readinto, piece, tensor)
    except OSError as error:
        raise CheckpointError(f"{tensor}: cannot be read ({error.strerror})") from None


def _fill(readinto: Callable[[Any], int | None], piece: np.ndarray, tensor: Tensor) -> None:
    view = memoryview(piece.view(np.uint8))  # type: ignore[arg-type]
    while len(view):
        count = readinto(view)
        if not count:
            raise CheckpointError(f"{tensor}: the file ended while it was read")
        view = view[count:]


def chunks(tensor: Tensor, rows: int | None = None) -> Iterator[np.ndarray]:
    """Yield the tensor's first `rows` rows flat, in pieces; each piece reuses one buffer."""
    dtype = DTYPES[tensor.dtype]
    count = math.prod(tensor.shape if rows is None else (rows, *tensor.shape[1:]))
    buffer = np.empty(min(count, CHUNK // dtype.itemsize), dtype)
    with _open_at(tensor) as fill:
        for start in range(0, count, max(1, len(buffer))):
            piece = buffer[: min(len(buffer), count - start)]
            fill(piece)
            yield piece


def read_into(tensor: Tensor, out: np.ndarray, report: Callable[[int], None]) -> bool:
    """Read the first rows of `tensor` into `out` (C-contiguous), cast; False if not finite.

    `report` receives the bytes of `out` filled by each step. Raises CheckpointError where the file
    cannot be read any more.
    """
    flat, source = out.reshape(-1), DTYPES[tensor.dtype]
    step, finite = CHUNK // max(source.itemsize, out.itemsize), True
    scratch = None if source == out.dtype else np.empty(min(step, len(flat)), source)
    with _open_at(tensor) as fill:
        for start in range(0, len(flat), step):
            piece = flat[start : start + step]
            if scratch is None:
                fill(piece)
            else:
                fill(scratch[: len(piece)])
                with np.errstate(over="ignore"):
                    piece[...] = scratch[: len(piece)].astype(out.dtype)
            finite = finite and is_finite(piece)
            report(piece.nbytes)
    return finite


def is_finite(piece: np.ndarray) -> bool:
    """Whether a flat array holds neither NaN nor infinity."""
    if piece.dtype == ml_dtypes.bfloat16:  # ufuncs on bfloat16 are slow: test the exponent bits
        return not bool(np.any((piece.view(np.uint16) & 0x7F80) == 0x7F80))
    return bool(np.isfinite(piece).all())


def equal_tensors(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors agree bit for bit; reads both in pieces and stops at a difference."""
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    pairs = zip(chunks(first), chunks(second), strict=True)
    return all(np.array_equal(a.view(np.uint8), b.view(np.uint8)) for a, b in pairs)
