"""Mutated configs: each loads as the file says, or is refused; none ends in another exception."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from convert import CheckpointError
from convert.packaging import DraftOverrides, read_draft, read_target
from convert.sources import Source
from tests.checkpoints import save_json, target_files, write_draft, write_target
from tests.dialects import DIALECTS
from tests.tiny_pair import TinyPair

PAIR = TinyPair()
SILENT = ("default", "class default", "tensor shapes", "packaging", "evenly spaced")
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats(allow_nan=True, allow_infinity=True)
    | st.text(max_size=8)
    | st.sampled_from([0, 1, -1, 7, 64, 2**31, 2**63, "full_attention", "yarn", "float16"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=6,
)


def paths(tree: Any, prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Every path to a value of nested objects."""
    found = []
    for key, value in tree.items():
        found.append((*prefix, key))
        found += paths(value, (*prefix, key)) if isinstance(value, dict) else []
    return found


def mutate(tree: Any, path: tuple[str, ...], value: Any, remove: bool) -> Any:
    made = copy.deepcopy(tree)
    inner = made
    for key in path[:-1]:
        inner = inner[key]
    if remove:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return made


def explained(before: Source, after: Source, path: tuple[str, ...], value: Any) -> bool:
    """Whether a change of the config is one that the report shows."""
    if before.config == after.config:  # type: ignore[attr-defined]
        return True
    if any(path[0] in warning for warning in after.warnings):
        return True
    changed = [s for name, s in after.settings.items() if before.settings.get(name) != s]
    taken = any(path[0] in s.origin for s in changed)
    return taken or any(s.origin.startswith(SILENT) for s in changed)


CASES = {"target": target_files(PAIR)[0]}
CASES |= {name: make(PAIR)[0] for name, make in DIALECTS.items()}


@pytest.fixture(scope="module")
def folder() -> Any:
    with tempfile.TemporaryDirectory() as made:
        write_target(Path(made) / "target", PAIR)
        for name in DIALECTS:
            pair = TinyPair(markov="none", confidence="none") if "z-lab" in name else PAIR
            write_draft(Path(made) / name, pair, name)
        yield Path(made)


def read(folder: Path, case: str) -> Source:
    target = read_target(folder / "target")
    if case == "target":
        return target
    block = DraftOverrides(block_size=5 if case == "torchspec" else None)
    return read_draft(folder / case, target, block)


def attempt(folder: Path, case: str) -> tuple[Source | None, tuple[str, ...]]:
    try:
        return read(folder, case), ()
    except CheckpointError as error:
        return None, error.problems


@pytest.mark.parametrize("case", list(CASES))
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(choice=st.data())
def test_a_mutated_config_loads_as_it_says_or_is_refused(
    folder: Path, case: str, choice: st.DataObject
) -> None:
    tree = CASES[case]
    save_json(folder / case / "config.json", tree)
    original = read(folder, case)
    path = choice.draw(st.sampled_from(paths(tree)))
    remove = choice.draw(st.booleans())
    value = None if remove else choice.draw(JSON)
    try:
        save_json(folder / case / "config.json", mutate(tree, path, value, remove))
        changed, problems = attempt(folder, case)
    finally:
        save_json(folder / case / "config.json", tree)
    if changed is None:
        assert problems
        assert all(len(problem) < 600 for problem in problems)
        named = ("config.json", ".safetensors")
        assert all(any(n in problem for n in named) for problem in problems), problems
    else:
        assert explained(original, changed, path, value), (path, value)
