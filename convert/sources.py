"""A checkpoint folder that has been opened: its config, its tensors by name, nothing read yet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from convert.dialects import architectures
from convert.headers import Tensor, read_headers, read_json
from convert.names import Ignored, Plan, by_canonical_name, set_aside
from convert.problems import CheckpointError, raise_problems
from convert.refusals import (
    KNOWN_KEYS,
    PLACED_KEYS,
    SECTIONS,
    refused_keys,
    refused_model,
    refused_tensors,
)
from convert.settings import SECTION, ConfigReading, Setting, brief
from dspark_jax.config import DraftConfig, TargetConfig

STORE_FILE = "dspark_store.json"


@dataclass(frozen=True, eq=False, kw_only=True)
class Source:
    """A checkpoint that has been understood and not yet read."""

    folder: Path
    packaging: str
    plan: Plan
    tensors: Mapping[str, Tensor]  # by canonical name
    settings: Mapping[str, Setting]
    ignored: tuple[Ignored, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True, eq=False, kw_only=True)
class TargetSource(Source):
    """A target checkpoint; `tied_head` is a stored head that must equal the embedding."""

    config: TargetConfig
    tied_head: Tensor | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class DraftSource(Source):
    """A draft checkpoint; `identity_map` is a stored vocabulary map that must be all zeros."""

    config: DraftConfig
    identity_map: Tensor | None = None


class Opened(NamedTuple):
    """What a folder holds; problems gather in `reading.problems`."""

    folder: Path
    subject: str
    reading: ConfigReading
    raw_names: list[str]
    named: dict[str, Tensor]
    duplicates: list[str]  # problems that do not keep the other tensors from being checked
    ignored: list[Ignored]
    warnings: list[str]

    def described(self, packaging: str, plan: Plan) -> dict[str, Any]:
        """Return the fields of a `Source`."""
        return {
            "folder": self.folder,
            "packaging": packaging,
            "plan": plan,
            "tensors": self.named,
            "settings": self.reading.settings,
            "ignored": tuple(self.ignored),
            "warnings": tuple(
                self.warnings + unknown_keys(self.reading) + misplaced_keys(self.reading)
            ),
        }


def open_folder(folder: str | Path, role: str) -> Opened:
    """Read config.json and the headers; raise at once on what is refused by name."""
    folder = Path(folder)
    subject = f"{role} {folder}"
    if not folder.is_dir():
        raise CheckpointError("no such folder", subject)
    if (folder / STORE_FILE).exists():
        raise CheckpointError("is a converted store, not a checkpoint: load it as it is", subject)
    problems: list[str] = []
    try:
        tree = read_json(folder / "config.json")
    except ValueError as error:
        raise CheckpointError(str(error), subject) from None
    _refuse_by_name(tree, subject)
    try:
        tensors, strays = read_headers(folder, problems)
    except OSError as error:
        raise CheckpointError(f"cannot be listed ({error.strerror})", subject) from None
    names = [tensor.name for tensor in tensors]
    raise_problems([str(refusal) for refusal in refused_tensors(names)], subject)
    duplicates: list[str] = []
    named = by_canonical_name(tensors, duplicates)
    ignored = [Ignored(name, name, "a weight file that does not belong to it") for name in strays]
    ignored += set_aside(named)
    warnings = []
    if "auto_map" in tree:
        warnings.append("auto_map names code to run; code from a checkpoint is never run")
    reading = ConfigReading(tree, problems)
    for section in (*filter(None, SECTIONS), "speculators_config"):
        reading.find(section, SECTION, section)
        reading.settings.pop(section, None)
    return Opened(folder, subject, reading, names, named, duplicates, ignored, warnings)


def _refuse_by_name(tree: dict[str, Any], subject: str) -> None:
    reading = ConfigReading(tree, [])
    paths = (
        "model_type",
        "speculators_model_type",
        "dflash_config.projector_type",
        "transformer_layer_config.model_type",
    )
    names = architectures(tree) + [str(value) for _, value in reading.present(*paths)]
    for name in names:
        if reason := refused_model(name):
            raise CheckpointError(f"config.json: {name}: {reason}", subject)
    raise_problems([f"config.json: {refusal}" for refusal in refused_keys(tree)], subject)
    if isinstance(tree.get("text_config"), dict):
        raise CheckpointError(
            "config.json: text_config: multimodal models are not supported", subject
        )


def unknown_keys(reading: ConfigReading) -> list[str]:
    """Warn of keys that nothing here understands: they may ask for what is not done."""
    origins = [setting.origin for setting in reading.settings.values()]
    used = {origin.rpartition(": ")[2].rpartition(".")[2] for origin in origins}
    known = KNOWN_KEYS | used | set(reading.settings)
    found = []
    for section in SECTIONS:
        values = reading.tree.get(section) if section else reading.tree
        for key, value in (values if isinstance(values, dict) else {}).items():
            if key not in known and value not in (None, False):
                found.append(f"{section}.{key}" if section else key)
    return [f"config.json: not understood and not used: {', '.join(found)}"] if found else []


def misplaced_keys(reading: ConfigReading) -> list[str]:
    """Warn of keys that stand where nothing reads them and say something else than what is used."""
    found = []
    for section in SECTIONS:
        values = reading.tree.get(section) if section else reading.tree
        for key, value in (values if isinstance(values, dict) else {}).items():
            path = f"{section}.{key}" if section else key
            used = reading.settings.get(key)
            if key not in PLACED_KEYS or path in reading.consulted or value is None:
                continue
            if used is None and value is False:  # asks for nothing
                continue
            if used is None or used.value != value or type(used.value) is not type(value):
                found.append(f"{path} is {brief(value)}")
    return [f"config.json: not used where it stands: {', '.join(found)}"] if found else []
