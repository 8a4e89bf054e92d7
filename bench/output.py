"""The files that a measurement leaves."""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path

from bench.records import Measurement
from dspark_jax.generate import tell


def check_outputs(options: argparse.Namespace) -> None:
    """Refuse before a long run what could not be written after it."""
    for path in filter(None, (options.json, options.html)):
        if not Path(path).absolute().parent.is_dir():
            raise ValueError(f"{path}: its folder does not exist; make it first")
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
