"""Files that a user names: where they are, and the JSON object that one holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def expand(path: str | Path, error: type[ValueError] = ValueError) -> Path:
    """The path with its `~` written out; raises `error`, with one sentence, where nobody's is."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise error(
            f"{path}: there is no such home folder; write the whole path, or set HOME"
        ) from None


def read_object(path: str | Path, remedy: str) -> dict[str, Any]:
    """The JSON object in a file; raises ValueError, which names the file and ends in `remedy`."""
    place = expand(path)
    try:
        text = place.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a null byte in the name
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"{path} cannot be read: {reason}; {remedy}") from None
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}; {remedy}") from None
    if not isinstance(tree, dict):
        raise ValueError(f"{path} holds no JSON object; {remedy}")
    return tree
