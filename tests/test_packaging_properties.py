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


# Settings under every spelling and in every place that some packaging knows.
PLACES = ("", "dflash_config", "dspark_config", "transformer_layer_config")
KEYS = (
    *("rope_theta", "rope_parameters", "rope_scaling", "rms_norm_eps", "hidden_size", "head_dim"),
    *("num_hidden_layers", "vocab_size", "draft_vocab_size", "use_qk_norm", "block_size"),
    *("dspark_block_size", "mask_token_id", "dspark_noise_token_id", "target_layer_ids"),
    *("aux_hidden_state_layer_ids", "target_hidden_size", "num_target_layers", "markov_rank"),
    *("markov_head_type", "enable_confidence_head", "sample_from_anchor", "dspark_bonus_anchor"),
    *("hidden_act", "attention_bias", "tie_word_embeddings"),
)
ADDED = [f"{place}.{key}".lstrip(".") for place in PLACES for key in KEYS] + list(PLACES[1:])
ODD = (0, 1, 3, -5, 5.0, 1e6, 1e300, 1_000_000, float("nan"), float("inf"), True, False, "x")
ODD_VALUES = st.sampled_from([*ODD, [], [1], {}, {"rope_theta": 5.0}])


def agrees(source: Source, path: str, value: Any) -> bool:
    """Whether the value is the one in use, was taken from this key, or is named in a warning."""
    key = path.rpartition(".")[2]
    word = key.removeprefix("dspark_")  # an override names the setting, not its spelling
    used = source.settings.get(key)
    taken = any(path in s.origin for s in source.settings.values())
    same = used is not None and used.value == value and type(used.value) is type(value)
    neutral = used is None and value is False
    return taken or same or neutral or any(word in warning for warning in source.warnings)


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


@pytest.mark.parametrize("case", list(CASES))
@settings(
    max_examples=100, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
@given(path=st.sampled_from(ADDED), value=ODD_VALUES)
def test_an_added_key_is_used_or_refused_or_named(
    folder: Path, case: str, path: str, value: Any
) -> None:
    tree = CASES[case]
    changed_tree = copy.deepcopy(tree)
    section, _, key = path.rpartition(".")
    inner = changed_tree.setdefault(section, {}) if section else changed_tree
    if inner.get(key) is not None:
        return  # the test above changes what is there
    inner[key] = value
    try:
        save_json(folder / case / "config.json", changed_tree)
        changed, problems = attempt(folder, case)
    finally:
        save_json(folder / case / "config.json", tree)
    if changed is None:
        assert problems
    elif value not in ({}, None):
        assert agrees(changed, path, value), (path, value)


@pytest.mark.parametrize("case", list(CASES))
def test_no_packaging_has_a_key_where_nothing_reads_it(folder: Path, case: str) -> None:
    assert not [w for w in read(folder, case).warnings if "not used where it stands" in w]
