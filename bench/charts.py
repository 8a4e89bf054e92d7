"""Charts of a measurement as SVG text."""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from bench.records import Run

COLOURS = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#999999", "#000000"),
)  # of Okabe and Ito
LEAST_DRAWN = 10  # rounds that a position needs to be drawn
PERCENTILES = ("p50", "p90", "p99")
LATENCIES = {
    "time_to_first_token": "time to first token",
    "inter_token_latency": "inter-token latency",
    "time_per_output_token": "time per output token",
}


def acceptance_chart(runs: Sequence[Run]) -> str | None:
    """Possible and realised acceptance by position; realised alone where not tested.

    Positions that too few rounds reached are left out.
    """
    figure, axes = _axes(ylabel="acceptance of rounds that reached it", xlabel="drafted position")
    for run, colour in _coloured(run for run in runs if run.num_drafts):
        found = run.figures()
        rows, clean = (
            [row for row in found["ceiling"][laws] if row["rounds"] >= LEAST_DRAWN]
            for laws in ("in_round", "clean")
        )
        for style, positions in (("--", rows), (":", clean)):
            x = [row["position"] for row in positions]
            axes.plot(x, [row["possible"] for row in positions], style, color=colour)
        if rows:
            axes.errorbar(
                [row["position"] for row in rows],
                [row["realised"] for row in rows],
                yerr=[3 * row["standard_error"] for row in rows],
                color=colour,
                marker="o",
                capsize=3,
                label=run.name,
            )
        elif rates := found["conditional_rates_by_position"]:
            x = list(range(1, len(rates) + 1))
            axes.plot(x, rates, color=colour, marker="o", label=run.name)
    axes.set_ylim(0, 1.02)
    if any(run.records and run.records[0].possible_acceptance for run in runs):
        axes.set_title(
            "possible in the round (dashed) and over a fresh prefill (dotted),"
            " realised ± 3 standard errors",
            fontsize=9,
        )
    return _svg(figure, axes)


def speedup_chart(rows: Sequence[dict[str, Any]]) -> str | None:
    """Speed-up of each draft against the baseline, with the range over repetitions."""
    shown = [row for row in rows if row["speedup"] is not None]
    figure, axes = _axes(xlabel="speed-up against the baseline", height=1.2 + 0.4 * len(shown))
    for place, row in enumerate(shown):
        low, high = row["speedup"] - row["least"], row["most"] - row["speedup"]
        axes.barh(place, row["speedup"], xerr=[[low], [high]], color=COLOURS[0], capsize=3)
    axes.set_yticks(range(len(shown)), [row["name"] for row in shown])
    axes.invert_yaxis()
    axes.axvline(1.0, color="black", linewidth=1)
    return _svg(figure, axes, legend=False)


def throughput_chart(runs: Sequence[Run]) -> str | None:
    """Tokens a second against concurrency; None without a sweep."""
    if len({run.concurrency for run in runs}) < 2:
        return None
    figure, axes = _axes(xlabel="concurrency", ylabel="output tokens/s")
    groups: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for run in runs:
        speed = run.figures()["latency"]["tokens_per_second"]
        groups[run.draft].append((run.concurrency, speed))
    for (draft, points), colour in zip(groups.items(), COLOURS, strict=False):
        axes.plot(*zip(*sorted(points), strict=True), color=colour, marker="o", label=draft)
    axes.set_ylim(bottom=0)
    return _svg(figure, axes)


def latency_chart(runs: Sequence[Run]) -> str | None:
    """Percentiles of the three latencies of each run, in milliseconds."""
    figure = Figure(figsize=(9, 3), layout="constrained")
    panels = figure.subplots(1, len(LATENCIES))
    for axes, (name, title) in zip(panels, LATENCIES.items(), strict=True):
        width = 0.8 / len(runs)
        for place, (run, colour) in enumerate(_coloured(runs)):
            found = run.figures()["latency"][name] or dict.fromkeys(PERCENTILES, 0.0)
            x = [i + place * width for i in range(len(PERCENTILES))]
            heights = [1e3 * found[p] for p in PERCENTILES]
            axes.bar(x, heights, width, color=colour, label=run.name)
        middle = 0.4 - width / 2
        axes.set_xticks([i + middle for i in range(len(PERCENTILES))], PERCENTILES)
        axes.set_title(f"{title}, ms", fontsize=9)
        _plain(axes)
    return _svg(figure, panels[0])


def histogram_chart(runs: Sequence[Run]) -> str | None:
    """Share of rounds by acceptance length."""
    figure, axes = _axes(xlabel="acceptance length", ylabel="share of rounds")
    drafted = list(_coloured(run for run in runs if run.num_drafts))
    for place, (run, colour) in enumerate(drafted):
        counts = run.figures()["histogram"]
        width = 0.8 / len(drafted)
        x = [length + (place + 0.5) * width - 0.4 for length in counts]
        total = sum(counts.values())
        heights = [count / total for count in counts.values()]
        axes.bar(x, heights, width, color=colour, label=run.name)
    return _svg(figure, axes)


def category_chart(runs: Sequence[Run]) -> str | None:
    """Acceptance length of the first run by category; None where prompts have none."""
    groups = runs[0].figures()["by_category"]
    figure, axes = _axes(xlabel="acceptance length", height=1.2 + 0.25 * len(groups))
    for place, found in enumerate(groups.values()):
        axes.barh(place, found["acceptance_length"] or 0.0, color=COLOURS[0])
    axes.set_yticks(range(len(groups)), list(groups))
    axes.invert_yaxis()
    return _svg(figure, axes, legend=False)


def sweep_chart(runs: Sequence[Run]) -> str | None:
    """Acceptance length and verify rate over the swept setting; None without a sweep."""
    drafted = [run for run in runs if run.num_drafts]
    swept = next(
        (
            (name, label)
            for name, label in (
                ("confidence_threshold", "confidence threshold"),
                ("num_drafts", "drafts a round"),
            )
            if any(
                len({getattr(r, name) for r in drafted if r.draft == d}) > 1
                for d in _drafts(drafted)
            )
        ),
        None,
    )
    if swept is None:
        return None
    name, label = swept
    figure = Figure(figsize=(9, 3), layout="constrained")
    panels = figure.subplots(1, 3)
    titles = ("acceptance length", "drafts a round", "verify rate")
    keys = ("acceptance_length", "drafts_per_round", "verify_rate")
    for axes, title, key in zip(panels, titles, keys, strict=True):
        for draft, colour in zip(_drafts(drafted), COLOURS, strict=False):
            points = [(getattr(r, name), r.figures()[key]) for r in drafted if r.draft == draft]
            axes.plot(*zip(*sorted(points), strict=True), color=colour, marker="o", label=draft)
        axes.set_title(title, fontsize=9)
        axes.set_xlabel(label)
        axes.set_ylim(bottom=0)
        _plain(axes)
    return _svg(figure, panels[0])


def _drafts(runs: Sequence[Run]) -> list[str]:
    return list(dict.fromkeys(run.draft for run in runs))


def _coloured(runs: Any) -> list[tuple[Run, str]]:
    return [(run, COLOURS[index % len(COLOURS)]) for index, run in enumerate(runs)]


def _axes(xlabel: str, ylabel: str = "", height: float = 3.2) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(6.4, height), layout="constrained")
    axes = figure.subplots()
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    if ylabel:  # x counts something
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _plain(axes)
    return figure, axes


def _plain(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)


def _svg(figure: Figure, axes: Axes, legend: bool = True) -> str | None:
    """The figure as SVG; None where nothing was drawn."""
    if not axes.has_data():
        return None
    if legend and axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8)
    return svg_text(figure)


def svg_text(figure: Figure) -> str:
    """The figure as SVG: text stays text, and the same figure is the same file."""
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "bench"}):
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()
