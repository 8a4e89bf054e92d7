"""Charts of what a device does: times against a floor, shares of a profile, rates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from bench.charts import COLOURS, svg_text
from bench.records import Curves

Line = dict[str, Any]


def save(name: str, data: Any, path: Path) -> None:
    """Draw the chart of a name into an SVG or PNG file."""
    figure = CHARTS[name](data)
    if path.suffix == ".svg":
        path.write_text(svg_text(figure), encoding="utf-8")
    else:
        figure.savefig(path, dpi=150)


def step_chart(lines: Sequence[Line]) -> Figure:
    """Milliseconds of each step by shape, with the floor as a mark on each bar."""
    places = list(dict.fromkeys(_place(line) for line in lines))
    names = list(dict.fromkeys(line["name"] for line in lines))
    figure = Figure(figsize=(2.5 + 1.6 * len(places), 3.4), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(names)
    for index, name in enumerate(names):
        own = [line for line in lines if line["name"] == name]
        x = [places.index(_place(line)) + (index + 0.5) * width - 0.4 for line in own]
        axes.bar(
            x,
            [line["time_us"] / 1e3 for line in own],
            width,
            color=COLOURS[index],
            label=name.replace("_", " "),
        )
        floors = [line["floor_us"] / 1e3 for line in own]
        floor = "floor: bytes / bandwidth" if index == len(names) - 1 else ""
        left = [one - width / 2 for one in x]
        axes.hlines(floors, left, [one + width for one in left], color="black", label=floor)
    axes.set_xticks(range(len(places)), places, fontsize=8)
    axes.set_ylabel("ms")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    first = lines[0]
    axes.set_title(f"{first['shape']['model']}, {first['dtype']}, {first['device']}", fontsize=9)
    axes.legend(fontsize=7)
    return figure


def _place(line: Line) -> str:
    shape = line["shape"]
    return f"{line['implementation']}\nbatch {shape['batch']}\n{shape['cached']:,} rows"


def profile_chart(lines: Sequence[Line]) -> Figure:
    """Milliseconds a round by class and by stage, one stacked bar a program."""
    figure = Figure(figsize=(8, 1.6 + 0.5 * len(lines)), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, key, title in zip(panels, ("classes", "stages"), ("kernel", "stage"), strict=True):
        ends = [0.0] * len(lines)
        for index, name in enumerate(lines[0][key]):
            widths = [line[key][name] / 1e3 for line in lines]
            axes.barh(range(len(lines)), widths, left=ends, color=COLOURS[index], label=name)
            ends = [end + width for end, width in zip(ends, widths, strict=True)]
        axes.set_title(f"by {title}", fontsize=9)
        axes.set_xlabel("ms of device time a round")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=6, ncols=2)
    panels[0].set_yticks(range(len(lines)), [line["name"].replace("_", " ") for line in lines])
    panels[0].invert_yaxis()
    return figure


def prefill_chart(lines: Sequence[Line]) -> Figure:
    """Tokens a second by length of the prompt, a line for each size of chunk."""
    figure = Figure(figsize=(5, 3.2), layout="constrained")
    axes = figure.subplots()
    kinds = dict.fromkeys((line["implementation"], line["shape"]["chunk"]) for line in lines)
    for (implementation, chunk), colour in zip(kinds, COLOURS, strict=False):
        own = [
            line
            for line in lines
            if (line["implementation"], line["shape"]["chunk"]) == (implementation, chunk)
        ]
        points = [(line["shape"]["tokens"], line["tokens_per_second"]) for line in own]
        label = f"{implementation}, chunks of {chunk}"
        axes.plot(*zip(*points, strict=True), color=colour, marker="o", label=label)
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("prompt tokens")
    axes.set_ylabel("tokens/s")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    return figure


def reliability_chart(curves: Curves) -> Figure:
    """What the confidence head told against what was accepted, one panel a set of temperatures."""
    figure = Figure(figsize=(7.4, 3.8), layout="constrained")
    panels = figure.subplots(1, len(curves), sharey=True, squeeze=False)[0]
    for axes, (title, positions) in zip(panels, curves.items(), strict=True):
        axes.plot([0, 1], [0, 1], color="black", linewidth=0.8)
        for position, points in enumerate(positions):
            axes.plot(
                [told for told, _ in points],
                [came for _, came in points],
                marker="o",
                markersize=3,
                linewidth=1,
                color=COLOURS[position % len(COLOURS)],
                label=f"position {position + 1}",
            )
        axes.set_title(title, fontsize=9)
        axes.set_xlabel("chance that the head told")
        axes.set_aspect("equal")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("share of prefixes accepted")
    panels[-1].legend(fontsize=7)
    return figure


CHARTS: dict[str, Callable[[Any], Figure]] = {
    "step_chart": step_chart,
    "profile_chart": profile_chart,
    "prefill_chart": prefill_chart,
    "reliability_chart": reliability_chart,
}
