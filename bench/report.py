"""A measurement as one HTML file that needs no network."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from bench import charts, device_charts
from bench.compare import speedups
from bench.output import check_file
from bench.records import Measurement, read_measurement
from bench.tables import number, verdict_line, with_error
from convert.flags import Parser
from dspark_jax.files import expand
from dspark_jax.generate import tell


def render(measurement: Measurement) -> str:
    """The report: settings, verdicts, tables, charts."""
    templates = Environment(
        loader=PackageLoader("bench"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    templates.filters |= {"number": number, "milliseconds": _milliseconds}
    compared = measurement.bench == "compare"
    return templates.get_template("report.html").render(
        measurement=measurement,
        runs=[(run, run.figures()) for run in measurement.runs],
        speedups=speedups(measurement.runs) if compared else [],
        charts=[(title, _data_uri(svg)) for title, svg in draw(measurement).items()],
        with_error=with_error,
        verdict_line=verdict_line,
        latencies=charts.LATENCIES,
    )


def draw(measurement: Measurement) -> dict[str, str]:
    """Title and SVG of each chart that has something to show."""
    runs = measurement.runs
    drawn: dict[str, str | None] = {}
    if measurement.bench == "compare":
        drawn["Speed-up"] = charts.speedup_chart(speedups(runs))
    drawn["Acceptance by position"] = charts.acceptance_chart(runs)
    drawn["Acceptance lengths"] = charts.histogram_chart(runs)
    drawn["Sweep"] = charts.sweep_chart(runs)
    drawn["Throughput against concurrency"] = charts.throughput_chart(runs)
    drawn["Latency"] = charts.latency_chart(runs)
    drawn["Acceptance length by category"] = charts.category_chart(runs)
    if measurement.reliability:
        figure = device_charts.reliability_chart(measurement.reliability)
        drawn["Reliability of the confidence head"] = charts.svg_text(figure)
    return {title: svg for title, svg in drawn.items() if svg}


def _data_uri(svg: str) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()


def _milliseconds(found: dict[str, Any] | None, name: str) -> str:
    return "-" if found is None else f"{1e3 * found[name]:.1f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Render the JSON that compare or speed wrote."""
    parser = Parser(prog="bench report", description=main.__doc__)
    parser.add_argument("file", help="JSON of bench compare or bench speed")
    parser.add_argument("--html", metavar="FILE", help="default: the name of the JSON, with .html")
    parser.add_argument("--charts", metavar="DIR", type=Path, help="also each chart as SVG")
    options = parser.parse_args(arguments)
    measurement = read_measurement(options.file)
    path = Path(options.html or expand(options.file).with_suffix(".html"))
    check_file("--html ", path)
    if options.charts:
        if options.charts.exists() and not options.charts.is_dir():
            raise ValueError(f"--charts {options.charts} is a file; name a folder")
        options.charts.mkdir(parents=True, exist_ok=True)
        for title, svg in draw(measurement).items():
            name = title.lower().replace(" ", "-")
            (options.charts / f"{name}.svg").write_text(svg, encoding="utf-8")
    path.write_text(render(measurement), encoding="utf-8")
    tell(f"wrote {path}")
    return 0
