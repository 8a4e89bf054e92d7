"""What a run leaves: one record a request, complete enough to compute every figure again."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import jax

from bench import figures
from bench.ceiling import ceiling
from dspark_jax.engine import Engine
from dspark_jax.loading import ran_by
from pallas_kernels.platform import default_device

NGRAM = "ngram"  # the name of prompt lookup, a draft that nobody trained


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
    arrivals: list[list[float]]
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
    reliability: dict[str, Any] | None = None  # of the confidence head, from `bench calibrate`

    def write(self, path: str | Path) -> None:
        """Write JSON: the records, and the figures that follow from them."""
        tree = asdict(self)
        for entry, run in zip(tree["runs"], self.runs, strict=True):
            entry["figures"] = run.figures()
        Path(path).write_text(json.dumps(tree, default=str) + "\n", encoding="utf-8")


def read_measurement(path: str | Path) -> Measurement:
    """Read what `Measurement.write` wrote. Raises ValueError for another file."""
    try:
        tree = json.loads(Path(path).read_text(encoding="utf-8"))
        runs = []
        for entry in tree["runs"]:
            entry.pop("figures")
            records = [Record(**record) for record in entry.pop("records")]
            runs.append(Run(records=records, **entry))
        return Measurement(
            tree["bench"], tree["settings"], tree["environment"], runs, tree.get("reliability")
        )
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{path} is not a file that `bench compare` or `bench speed` wrote: {error!r}"
        ) from None


def environment(engine: Engine) -> dict[str, Any]:
    """The device and the software that a measurement ran on."""
    return {
        "device": default_device().device_kind,
        "jax": f"jax {jax.__version__}",
        "dtype": engine.config.dtype,
        "implementation": ran_by(engine.config),
    }
