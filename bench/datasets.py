"""Prompts to measure on: SPEED-Bench (parquet or JSONL), JSONL with `turns`, a user's own file."""

from __future__ import annotations

import json
import random
import reprlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# What the public rows of SPEED-Bench hold where a licence forbids to pass the prompt on.
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"
PREPARE = (
    "prepare the set first: `prepare_data.py --dataset speed --config all` in"
    " examples/specdec_bench of github.com/NVIDIA/Model-Optimizer writes data/speed/<subset>"
)
SUBSETS = ("qualitative", *(f"throughput_{size}k" for size in (1, 2, 8, 16, 32)))
SUFFIXES = (".parquet", ".jsonl", ".json", ".txt")


@dataclass(frozen=True)
class Conversation:
    """User turns in order, with the fields of SPEED-Bench; other sets leave them empty."""

    question_id: str
    turns: tuple[str, ...]
    category: str = ""
    sub_category: str = ""
    source: str = ""
    src_id: str = ""
    difficulty: str = ""
    multiturn: bool = False
    subset: str = ""

    @property
    def is_placeholder(self) -> bool:
        return any(PLACEHOLDER in turn for turn in self.turns)


def read_conversations(place: str | Path, subsets: Sequence[str] = ()) -> list[Conversation]:
    """Read a file, or a folder of SPEED-Bench with one folder or file a subset.

    A line of a text file is a prompt. A row of the other kinds holds `turns` (a list of strings),
    `messages` (of which the user's count) or `prompt`. Raises ValueError, naming file and line.
    """
    place = Path(place)
    if place.is_file():
        if subsets:
            raise ValueError(f"{place} is a file and has no subsets; leave --subset out")
        return list(_read_file(place, ""))
    if not place.is_dir():
        raise ValueError(
            f"{place}: no such file or folder; name a file ({', '.join(SUFFIXES)}) or a folder of"
            f" SPEED-Bench. For the latter {PREPARE}"
        )
    found: list[Conversation] = []
    for subset, files in _subset_files(place, subsets):
        for file in files:
            found += _read_file(file, subset, len(found))
    return found


def _subset_files(folder: Path, subsets: Sequence[str]) -> Iterator[tuple[str, list[Path]]]:
    if not subsets and (files := _files(folder)):
        yield folder.name if folder.name in SUBSETS else "", files
        return
    for subset in subsets or SUBSETS[:1]:
        files = _files(folder / subset) or [
            path for suffix in SUFFIXES if (path := folder / f"{subset}{suffix}").is_file()
        ]
        if not files:
            held = ", ".join(sorted(path.name for path in folder.iterdir())) or "nothing"
            raise ValueError(f"{folder} has no subset {subset}: it holds {held}; {PREPARE}")
        yield subset, files


def _files(folder: Path) -> list[Path]:
    """The files of the first kind that a folder has, so that two copies are not read twice."""
    kinds = (sorted(folder.glob(f"*{suffix}")) for suffix in (".parquet", ".jsonl"))
    return next(filter(None, kinds), [])


def _read_file(path: Path, subset: str, first: int = 0) -> Iterator[Conversation]:
    """The rows of a file; one without `question_id` is numbered from `first` on."""
    rows = _rows(path)
    if not rows:
        raise ValueError(f"{path} holds no prompt")
    for index, (name, row) in enumerate(rows):
        yield _conversation(row, name, first + index, subset)


def _rows(path: Path) -> list[tuple[str, Any]]:
    """Each row, with the name that errors call it by."""
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        return _numbered(path, _parquet_rows(path))
    if suffix not in SUFFIXES:
        raise ValueError(f"{path}: cannot read {suffix or 'a file without suffix'}; {SUFFIXES} can")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}") from None
    if suffix == ".json":
        rows = _parse(str(path), text)
        return _numbered(path, rows if isinstance(rows, list) else [rows])
    lines = [
        (f"{path}, line {number}", line)
        for number, line in enumerate(text.split("\n"), start=1)
        if line.strip()
    ]
    if suffix == ".txt":
        return [(name, {"prompt": line}) for name, line in lines]
    return [(name, _parse(name, line)) for name, line in lines]


def _numbered(path: Path, rows: list[Any]) -> list[tuple[str, Any]]:
    return [(f"{path}, row {index}", row) for index, row in enumerate(rows)]


def _parse(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is not valid JSON: {error}") from None


def _parquet_rows(path: Path) -> list[Any]:
    try:
        from pyarrow import ArrowInvalid
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise ValueError(
            f"{path} needs pyarrow: pip install 'dspark-jax[bench]', or give JSONL"
        ) from None
    try:
        with ParquetFile(path) as file:
            return file.read().to_pylist()
    except ArrowInvalid as error:
        raise ValueError(f"{path} is not a readable parquet file: {error}") from None


def _conversation(row: Any, name: str, index: int, subset: str) -> Conversation:
    if not isinstance(row, dict):
        raise ValueError(f"{name} must be an object with `turns`, got {str(row)[:40]!r}")
    turns = row.get("turns")
    if turns is None and "messages" in row:
        turns = _user_turns(name, row["messages"])
    if turns is None:
        turns = row.get("prompt")
    turns = [turns] if isinstance(turns, str) else turns
    if not isinstance(turns, list) or not turns or not all(isinstance(t, str) and t for t in turns):
        raise ValueError(f"{name} needs `turns` (a list of strings), `messages` or `prompt`")
    texts = {
        field: str(row.get(field) or "")
        for field in ("category", "sub_category", "source", "src_id", "difficulty")
    }
    return Conversation(
        question_id=str(row.get("question_id", index)),
        turns=tuple(turns),
        multiturn=len(turns) > 1,
        subset=subset,
        **texts,
    )


def _user_turns(name: str, messages: Any) -> list[Any]:
    if not isinstance(messages, list) or not all(isinstance(one, dict) for one in messages):
        raise ValueError(
            f"{name}: messages must be a list of objects with role and content, got"
            f" {reprlib.repr(messages)}"
        )
    return [one.get("content") for one in messages if one.get("role") == "user"]


def select(
    conversations: Sequence[Conversation],
    *,
    categories: Sequence[str] = (),
    sub_categories: Sequence[str] = (),
    most: int | None = None,
    shuffle_seed: int | None = None,
) -> list[Conversation]:
    """Those of the categories, shuffled where a seed is given, at most `most` of each subset.

    Raises ValueError for a category that does not occur and for placeholder prompts.
    """
    chosen = _keep(conversations, "category", categories)
    chosen = _keep(chosen, "sub_category", sub_categories)
    empty = sum(one.is_placeholder for one in chosen)
    if empty:
        raise ValueError(
            f"{empty} of {len(chosen)} prompts are placeholders, as SPEED-Bench publishes them for"
            f" sources it may not pass on; {PREPARE}"
        )
    if shuffle_seed is not None:
        random.Random(shuffle_seed).shuffle(chosen)
    subsets = list(dict.fromkeys(one.subset for one in chosen))
    return [one for name in subsets for one in [c for c in chosen if c.subset == name][:most]]


def _keep(
    conversations: Sequence[Conversation], field: str, wanted: Sequence[str]
) -> list[Conversation]:
    if not wanted:
        return list(conversations)
    known = sorted({getattr(one, field) for one in conversations} - {""})
    for name in wanted:
        if name not in known:
            raise ValueError(f"no {field} {name}; there are: {', '.join(known) or 'none'}")
    return [one for one in conversations if getattr(one, field) in wanted]
