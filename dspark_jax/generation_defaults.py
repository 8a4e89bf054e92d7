"""Sampling settings that a checkpoint's generation_config.json asks for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FILE = "generation_config.json"
# The settings of transformers that change what is sampled, with the value that does nothing.
_NEUTRAL: dict[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "no_repeat_ngram_size": 0,
    "num_beams": 1,
    "penalty_alpha": 0.0,
}


def read_defaults(folder: Path) -> dict[str, Any]:
    """What the file sets, by the names of SamplingParams; empty where it does not sample.

    As in transformers, a file that samples without naming a temperature means 1.0. Raises
    ValueError for a file that is no JSON object.
    """
    path = folder / FILE
    if not path.exists():
        return {}
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(tree, dict):
        raise ValueError(f"{path} must hold a JSON object")
    if not tree.get("do_sample"):
        return {}
    found = {
        name: tree[name]
        for name, neutral in _NEUTRAL.items()
        if tree.get(name) is not None and tree[name] != neutral
    }
    return {"temperature": 1.0, **found}
