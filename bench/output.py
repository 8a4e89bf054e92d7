"""The files that a measurement leaves."""

from __future__ import annotations

import argparse
from pathlib import Path

from bench.records import Measurement
from dspark_jax.generate import tell


def write_outputs(measurement: Measurement, options: argparse.Namespace) -> None:
    """Write the JSON and the report that were asked for."""
    if options.json:
        measurement.write(options.json)
        tell(f"wrote {options.json}")
    if options.html:
        from bench.report import render  # matplotlib takes long to import

        Path(options.html).write_text(render(measurement), encoding="utf-8")
        tell(f"wrote {options.html}")
