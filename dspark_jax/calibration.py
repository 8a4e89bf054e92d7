"""Temperatures of the confidence head by position, kept in a file (paper, Sequential Temperature
Scaling; `python -m bench calibrate` fits them)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dspark_jax.config import ModelConfig
from dspark_jax.files import expand, read_object
from dspark_jax.tiers import is_positive

VERSION = 1
REMEDY = "fit temperatures with python -m bench calibrate --out FILE"


def save_calibration(
    path: str | Path, config: ModelConfig, temperatures: Sequence[float], **more: Any
) -> None:
    """Write one temperature a position, and whatever else is worth keeping beside them."""
    tree = {
        "version": VERSION,
        "pair": config.pair_digest,
        "temperatures": [float(one) for one in temperatures],
        **more,
    }
    expand(path).write_text(json.dumps(tree, indent=1) + "\n", encoding="utf-8")


def read_calibration(path: str | Path, config: ModelConfig) -> tuple[float, ...]:
    """Read temperatures; raises ValueError for another file, and for those of another pair."""
    tree = read_object(path, REMEDY)
    try:
        return _temperatures(tree, config)
    except ValueError as error:
        raise ValueError(f"calibration {path}: {error}; {REMEDY}") from None


def _temperatures(tree: dict[str, Any], config: ModelConfig) -> tuple[float, ...]:
    found, drafts = tree.get("temperatures"), config.decode.num_drafts
    if tree.get("version") != VERSION:
        raise ValueError(f"version {tree.get('version')!r}, this program reads {VERSION}")
    if tree.get("pair") != config.pair_digest:
        raise ValueError("the temperatures are of a pair of other shapes")
    if not isinstance(found, list) or not all(map(is_positive, found)):
        raise ValueError("temperatures must be a list of float32 numbers above 0")
    if len(found) < drafts:
        raise ValueError(f"{len(found)} temperatures are too few for {drafts} drafts")
    return tuple(map(float, found))
