"""What a run leaves: one record a request, complete enough to compute every figure again."""

from __future__ import annotations

import json
import sys
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import jax

from bench import figures
from bench.ceiling import ceiling
from dspark_jax.engine import Engine
from dspark_jax.files import read_object
from dspark_jax.loading import ran_by
from pallas_kernels.platform import default_device

NGRAM = "ngram"  # the name of prompt lookup, a draft that nobody trained
# Title of a panel -> for each position, points of a chance that was told and the share accepted.
Curves = dict[str, list[list[tuple[float, float]]]]


@dataclass(frozen=True)
class Record:
    """One answered turn. Rounds as in `dspark_jax.Result`.

    `sent` is in seconds since the first request of its `batch` was sent, and batches came one after
    the other; `arrivals` holds (seconds since it was sent, tokens by then) for each output that
    came. `possible_acceptance` (inside the round) and
    `clean_acceptance` (the draft step repeated over a freshly prefilled text; empty for rounds
    that were not repeated) have one entry a proposed draft, a list a round.
    """

    question_id: str
    turn: int
    prompt_tokens: int
    output_tokens: int
    finish_reason: str
    seed: int
    arrivals: list[tuple[float, int]]
    acceptance_lengths: list[int]
    proposal_lengths: list[int]
    accepted_drafts: list[int]
    batch: int = 0
    sent: float = 0.0
    text: str = ""
    category: str = ""
    sub_category: str = ""
    subset: str = ""
    possible_acceptance: list[list[float]] | None = None
    clean_acceptance: list[list[float]] | None = None

    @property
    def conversation(self) -> tuple[str, str]:
        """What the turns of one conversation share."""
        return self.subset, self.question_id


@dataclass(frozen=True)
class Run:
    """Requests answered under the same settings.

    `seconds` holds the time of all requests, once a repetition. `left_out` counts turns that did
    not fit `max_length`.
    """

    name: str
    draft: str
    num_drafts: int
    confidence_threshold: float
    concurrency: int
    temperature: float
    records: list[Record]
    seconds: list[float] = field(default_factory=list)
    left_out: int = 0

    def figures(self) -> dict[str, Any]:
        """Every figure of the run: acceptance, by category and subset, latency, ceiling."""
        found = figures.acceptance(self.records)
        found["by_category"] = figures.by_group(self.records, "category")
        found["by_sub_category"] = figures.by_group(self.records, "sub_category")
        found["by_subset"] = figures.by_group(self.records, "subset")
        found["latency"] = figures.latency(self.records)
        found["ceiling"] = ceiling(self.records, self.temperature, trained=self.draft != NGRAM)
        return found


@dataclass(frozen=True)
class Measurement:
    """All runs of one command, with the settings and the device they ran on."""

    bench: str
    settings: dict[str, Any]
    environment: dict[str, Any]
    runs: list[Run]
    reliability: Curves | None = None  # of the confidence head, from `bench calibrate`

    def write(self, path: str | Path) -> None:
        """Write JSON: the records, and the figures that follow from them."""
        tree = asdict(self)
        for entry, run in zip(tree["runs"], self.runs, strict=True):
            entry["figures"] = run.figures()
        Path(path).write_text(json.dumps(tree, default=str) + "\n", encoding="utf-8")


def read_measurement(path: str | Path) -> Measurement:
    """Read what `Measurement.write` wrote. Raises ValueError for another file."""
    tree = read_object(path, "name a file that bench compare or bench speed wrote")
    try:
        measurement = typed("the file", tree, Measurement)
        _check(measurement)
        return measurement
    except ValueError as error:
        raise ValueError(
            f"{path} is not a file that bench compare or bench speed wrote ({error}); name one"
        ) from None


def typed(name: str, value: Any, kind: Any) -> Any:
    """A value of JSON as what a type says, dataclasses included; ValueError, by name, for another.

    Keys that a dataclass does not know are left out.
    """
    outer, inner = get_origin(kind) or kind, get_args(kind)
    if outer is UnionType:  # with None
        return None if value is None else typed(name, value, inner[0])
    if outer is list and isinstance(value, list):
        return [typed(name, one, inner[0]) for one in value]
    if outer is tuple and isinstance(value, list) and len(value) == len(inner):
        return tuple(typed(name, one, own) for one, own in zip(value, inner, strict=True))
    if outer is dict and isinstance(value, dict):
        return {key: typed(name, one, inner[1]) for key, one in value.items()}
    if is_dataclass(outer) and isinstance(value, dict):
        for one in fields(outer):
            if one.name not in value and one.default is one.default_factory is MISSING:
                raise ValueError(f"{one.name} is missing")
        kinds = get_type_hints(outer).items()
        return kind(**{key: typed(key, value[key], own) for key, own in kinds if key in value})
    if outer is float and type(value) in (int, float):
        right = abs(value) <= sys.float_info.max  # JSON as Python reads it has NaN and Infinity
    else:
        right = outer is Any or type(value) is outer
    if not right:
        raise ValueError(f"{name} cannot be {value!r:.40}")
    return value


def _check(measurement: Measurement) -> None:
    """Raise ValueError for what no run leaves, and no figure can be made of."""
    runs = measurement.runs
    if not runs or not all(run.records for run in runs):
        raise ValueError("it has no runs, or one without records")
    for record in (record for run in runs for record in run.records):
        rounds = (
            *(record.acceptance_lengths, record.proposal_lengths, record.accepted_drafts),
            *(record.possible_acceptance, record.clean_acceptance),
        )
        if len({len(each) for each in rounds if each is not None}) > 1:
            raise ValueError("a record has lists of rounds that differ in length")
        if record.sent < 0 or not record.arrivals or record.arrivals[-1][0] <= 0:
            raise ValueError("a record has no time")
    if measurement.bench == "compare":
        seconds = [one for run in runs for one in run.seconds]
        repeats = {len(run.seconds) for run in runs}
        if len(repeats) > 1 or not seconds or min(seconds) <= 0:
            raise ValueError("its runs have no seconds, or some have more than others")


def environment(engine: Engine) -> dict[str, Any]:
    """The device and the software that a measurement ran on."""
    return {
        "device": default_device().device_kind,
        "jax": f"jax {jax.__version__}",
        "dtype": engine.config.dtype,
        "implementation": ran_by(engine.config),
    }
