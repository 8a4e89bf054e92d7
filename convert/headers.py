"""Safetensors headers as byte ranges, checked before any memory is taken; nothing is executed.

The `safetensors` package does not tell where a tensor lies, and rows must be read straight into
the buffer that becomes the parameter, so the header is parsed here.
"""

from __future__ import annotations

import codecs
import json
import math
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_HEADER = 100_000_000  # the format's own limit
MAX_JSON = 64_000_000
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I8", "U8", "BOOL"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
WEIGHT_DTYPES = ("F32", "F16", "BF16")


@dataclass(frozen=True)
class Tensor:
    """One tensor of a safetensors file; nothing of it has been read."""

    name: str  # as the file spells it
    file: Path
    dtype: str  # as the file spells it
    shape: tuple[int, ...]
    begin: int  # first byte, counted from the start of the file

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * BITS[self.dtype] // 8

    def __str__(self) -> str:
        return f"{self.name} in {self.file.name}"


class _DuplicateKey(ValueError):
    pass


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for key, value in pairs:
        if key in made:
            raise _DuplicateKey(key)
        made[key] = value
    return made


def parse_json(raw: bytes, label: str) -> dict[str, Any]:
    """Return the JSON object in `raw`; ValueError says what is wrong with `label`."""
    if raw.startswith(codecs.BOM_UTF8):  # tokenizer libraries do not read such a file either
        raise ValueError(f"{label}: starts with a byte-order mark: save it as UTF-8 without one")
    try:
        tree = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique)
    except _DuplicateKey as key:
        raise ValueError(f"{label}: the entry {key} is there twice") from None
    except RecursionError:
        raise ValueError(f"{label}: nested too deeply to be a configuration") from None
    except ValueError as error:
        raise ValueError(f"{label}: not valid JSON ({error})") from None
    if not isinstance(tree, dict):
        raise ValueError(f"{label}: must hold a JSON object, got {type(tree).__name__}")
    return tree


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; ValueError names the file that is absent, too large or malformed."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ValueError(f"{path.name}: not a regular file")
        if path.stat().st_size > MAX_JSON:
            raise ValueError(f"{path.name}: larger than {MAX_JSON} bytes, not a configuration")
        return parse_json(path.read_bytes(), path.name)
    except OSError as error:
        raise ValueError(f"{path.name}: cannot be read ({error.strerror})") from None


def read_header(path: Path) -> list[Tensor]:
    """Read and check the header of one safetensors file.

    Every length is held against the size of the file before it is used, so a header that lies
    about sizes or offsets costs no memory. Raises ValueError with one sentence.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait for ever
            raise ValueError(f"{path.name}: not a regular file")
        with path.open("rb") as file:
            size = path.stat().st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER):
                raise ValueError(
                    f"{path.name}: not a complete safetensors file (a header of {length} bytes is"
                    f" announced, the file has {size}); download it again"
                )
            tree = parse_json(file.read(length), f"{path.name} header")
    except OSError as error:
        raise ValueError(f"{path.name}: cannot be read ({error.strerror})") from None
    tree.pop("__metadata__", None)
    tensors = [_entry(path, name, entry, 8 + length) for name, entry in tree.items()]
    _check_layout(path, tensors, 8 + length, size)
    return tensors


def _entry(path: Path, name: str, entry: Any, base: int) -> Tensor:
    where = f"{path.name} header: {name}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{where} must have dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise ValueError(f"{where} has the unknown dtype {dtype}")
    for field in (shape, offsets):
        if not isinstance(field, list) or not all(type(n) is int and n >= 0 for n in field):
            raise ValueError(f"{where} has sizes that are not whole numbers: {field}")
    if len(offsets) != 2 or len(shape) > 8:
        raise ValueError(f"{where} has a malformed shape {shape} or offsets {offsets}")
    if (offsets[1] - offsets[0]) * 8 != math.prod(shape) * BITS[dtype]:
        raise ValueError(
            f"{where} of shape {shape} and dtype {dtype} does not fill its bytes"
            f" {offsets[0]} to {offsets[1]}"
        )
    return Tensor(name, path, dtype, tuple(shape), base + offsets[0])


def _check_layout(path: Path, tensors: list[Tensor], base: int, size: int) -> None:
    """The format allows no gap and no overlap; both are how a file hides or repeats data."""
    position = base
    for tensor in sorted(tensors, key=lambda t: (t.begin, t.nbytes)):
        if tensor.begin != position:
            word = "overlaps" if tensor.begin < position else "leaves a gap after"
            raise ValueError(f"{path.name} header: {tensor.name} {word} the tensor before it")
        position += tensor.nbytes
    if position != size:
        raise ValueError(
            f"{path.name}: truncated or damaged (its header describes {position} bytes, the file"
            f" has {size}); download it again"
        )


def _shards(folder: Path, problems: list[str]) -> tuple[list[str], dict[str, str] | None]:
    """Names of the weight files, and tensor -> file as the index says (None without an index)."""
    if (folder / INDEX).exists():
        try:
            weight_map = read_json(folder / INDEX).get("weight_map")
        except ValueError as error:
            problems.append(str(error))
            return [], None
        if not isinstance(weight_map, dict) or not weight_map:
            problems.append(f"{INDEX}: has no weight_map")
            return [], None
        names = sorted({str(name) for name in weight_map.values()})
        outside = [n for n in names if Path(n).name != n or not n.endswith(".safetensors")]
        problems += [f"{INDEX}: {n!r} is not the name of a safetensors file" for n in outside]
        return [n for n in names if n not in outside], weight_map
    if (folder / SINGLE).exists():
        return [SINGLE], None
    problems.append(_no_weights(folder))
    return [], None


def _no_weights(folder: Path) -> str:
    names = sorted(p.name for p in folder.iterdir())
    safe = [n for n in names if n.endswith(".safetensors")]
    pickles = [n for n in names if n.endswith(PICKLES)]
    if safe:
        return f"{safe[0]} is there, but neither {SINGLE} nor {INDEX}: fetch the missing file"
    if pickles:
        return (
            f"{pickles[0]} is a pickle, which can run code when opened, and is refused: convert it"
            " with transformers' save_pretrained (safetensors is its default) on a machine where"
            " you trust the file"
        )
    return f"no weights: neither {SINGLE} nor {INDEX}"


def read_headers(folder: Path, problems: list[str]) -> tuple[list[Tensor], list[str]]:
    """Return the tensors of a checkpoint folder and its stray weight files.

    The index decides which files belong to it. Problems are appended, one sentence each.
    """
    names, weight_map = _shards(folder, problems)
    tensors: list[Tensor] = []
    for name in names:
        if not (folder / name).exists():
            problems.append(f"{name}: missing, although {INDEX} lists it")
            continue
        try:
            tensors += read_header(folder / name)
        except ValueError as error:
            problems.append(str(error))
    if weight_map is not None and not problems:
        _check_index(tensors, weight_map, problems)
    strays = [
        p.name
        for p in sorted(folder.iterdir())
        if p.name not in names and p.name.endswith((".safetensors", *PICKLES))
    ]
    return tensors, strays


def _check_index(tensors: list[Tensor], weight_map: dict[str, str], problems: list[str]) -> None:
    held: dict[str, Path] = {}
    for tensor in tensors:
        if tensor.name in held:
            first = held[tensor.name].name
            problems.append(f"{tensor.name}: duplicated, in {first} and in {tensor.file.name}")
        elif weight_map.get(tensor.name) != tensor.file.name:
            listed = weight_map.get(tensor.name, "nowhere")
            problems.append(f"{tensor}: {INDEX} lists it in {listed}")
        held[tensor.name] = tensor.file
    for name, file in weight_map.items():
        if name not in held:
            problems.append(f"{name}: missing from {file}, although {INDEX} lists it")
