"""Temperatures of the confidence head by position, kept in a file (paper, Sequential Temperature
Scaling; `python -m bench calibrate` fits them)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dspark_jax.config import ModelConfig

VERSION = 1


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
    Path(path).write_text(json.dumps(tree, indent=1) + "\n", encoding="utf-8")


def read_calibration(path: str | Path, config: ModelConfig) -> tuple[float, ...]:
    """Read temperatures; raises ValueError for another file, and for those of another pair."""
    remedy = "fit them with python -m bench calibrate"
    try:
        tree = json.loads(Path(path).read_text(encoding="utf-8"))
        if tree["version"] != VERSION:
            raise ValueError(f"version {tree['version']}, this program reads {VERSION}")
        if tree["pair"] != config.pair_digest:
            raise ValueError("the temperatures are of a pair of other shapes")
        return tuple(float(one) for one in tree["temperatures"])
    except OSError as error:
        raise ValueError(f"calibration {path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        reason = str(error) if isinstance(error, ValueError) else f"no temperatures ({error!r})"
        raise ValueError(f"calibration {path}: {reason}; {remedy}") from None
