"""Folders that a command writes: new ones only, so that nothing of another run mixes in."""

from __future__ import annotations

from pathlib import Path


def check_unused(folder: str | Path, error: type[ValueError]) -> None:
    """Raise `error`, with one sentence, where the folder is in use or cannot be looked at."""
    folder = Path(folder)
    try:
        used = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    except OSError as cause:
        raise error(f"{folder} cannot be written: {cause.strerror}") from None
    if used:
        raise error(f"{folder} exists and is not an empty folder: choose another")
