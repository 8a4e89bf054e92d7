"""The files that a measurement leaves."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench.records import Measurement
from dspark_jax.generate import tell


def check_file(flag: str, path: str | Path) -> None:
    """Refuse before a long run a file that could not be written after it."""
    place = Path(path).absolute()
    if not place.parent.is_dir():
        raise ValueError(f"{flag}{path}: its folder does not exist; make it first")
    if place.is_dir():
        raise ValueError(f"{flag}{path} is a folder; name a file")
    if not os.access(place if place.exists() else place.parent, os.W_OK):
        raise ValueError(f"{flag}{path} cannot be written; name another file")


def check_outputs(options: argparse.Namespace) -> None:
    """Refuse before a long run what could not be written after it."""
    for path in filter(None, (options.json, options.html)):
        check_file("", path)
    if options.html and not find_spec("matplotlib"):
        raise ValueError("--html needs matplotlib: pip install 'dspark-jax[bench]'")


def write_outputs(measurement: Measurement, options: argparse.Namespace) -> None:
    """Write the JSON and the report that were asked for."""
    if options.json:
        measurement.write(options.json)
        tell(f"wrote {options.json}")
    if options.html:
        from bench.report import render  # matplotlib takes long to import

        Path(options.html).write_text(render(measurement), encoding="utf-8")
        tell(f"wrote {options.html}")


def check_out(path: Path | None) -> None:
    """Refuse before a long run what --out names, where it could not be written after it."""
    if path:
        check_file("--out ", path)


def append_lines(lines: Sequence[Any], path: Path | None) -> None:
    """Append JSON Lines to the file that was asked for."""
    if path:
        with path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)


def check_chart(path: Path | None) -> None:
    """Refuse before a long run a chart that could not be written after it."""
    if path is None:
        return
    if path.suffix not in (".svg", ".png"):
        raise ValueError(f"--chart {path}: name a file that ends in .svg or .png")
    check_file("--chart ", path)
    if not find_spec("matplotlib"):
        raise ValueError("--chart needs matplotlib: pip install 'dspark-jax[bench]'")


def save_chart(name: str, data: Any, path: Path | None) -> None:
    """Draw `data` with a function of `bench.device_charts` into the file that was asked for."""
    if path:
        import_module("bench.device_charts").save(name, data, path)
        tell(f"wrote {path}")
