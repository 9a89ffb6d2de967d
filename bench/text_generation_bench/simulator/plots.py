"""Plots of experiments as SVG: latencies, goodput and hit rate as bars, goodput over time as lines."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from text_generation_bench.simulator.config import POLICIES
from text_generation_bench.simulator.experiment import ExperimentResult
from text_generation_bench.simulator.report import milliseconds

POINTS = 60
"""Most points of a line over time."""

PANEL_WIDTH, BAR_HEIGHT, HEAD, GAP = 300, 18, 26, 16
LABEL_WIDTH, VALUE_WIDTH = 92, 62
LINES_HEIGHT = 150
COLOURS = ("#1f6feb", "#d1642f", "#6e7781", "#9a6fb0", "#3a8f5c", "#b08a2e", "#7d4e4e", "#4e7d7d")
_TEXT = 'font-family="sans-serif" font-size="11" fill="#24292f"'


@dataclass(frozen=True, slots=True)
class BarChart:
    """One bar per name: `values` are the lengths, `texts` the labels."""

    title: str
    values: Mapping[str, float]
    texts: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class LineChart:
    """One line per name over evenly spaced points, in the colours of the bar charts beside it."""

    title: str
    values: dict[str, Sequence[float]]


Panel = BarChart | LineChart


def svg(rows: Sequence[tuple[str, Sequence[Panel]]], names: Sequence[str]) -> str:
    """Return rows of panels under their titles. A name has the same colour in all panels, by its index in `names`."""
    colours = {name: COLOURS[at % len(COLOURS)] for at, name in enumerate(names)}
    parts: list[str] = []
    y = GAP
    for title, panels in rows:
        parts.append(f'<text x="{GAP}" y="{y + 12}" {_TEXT} font-weight="bold">{escape(title)}</text>')
        y += HEAD
        for column, panel in enumerate(panels):
            parts.append(_panel(panel, GAP + column * (PANEL_WIDTH + GAP), y, colours))
        y += max((_height(panel) for panel in panels), default=0) + GAP
    width = GAP + max((len(panels) for _, panels in rows), default=0) * (PANEL_WIDTH + GAP)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{y}" viewBox="0 0 {width} {y}">\n'
        f'<rect width="{width}" height="{y}" fill="#ffffff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _height(panel: Panel) -> int:
    return HEAD + (len(panel.values) * BAR_HEIGHT if isinstance(panel, BarChart) else LINES_HEIGHT)


def _panel(panel: Panel, x: int, y: int, colours: Mapping[str, str]) -> str:
    title = f'<text x="{x}" y="{y + 12}" {_TEXT}>{escape(panel.title)}</text>'
    drawn = (
        _draw_bars(panel, x, y + HEAD, colours)
        if isinstance(panel, BarChart)
        else _draw_lines(panel, x, y + HEAD, colours)
    )
    return "\n".join([title, *drawn])


def _draw_bars(panel: BarChart, x: int, y: int, colours: Mapping[str, str]) -> list[str]:
    most = max(panel.values.values(), default=0.0) or 1.0
    room = PANEL_WIDTH - LABEL_WIDTH - VALUE_WIDTH
    parts = []
    for row, (name, value) in enumerate(panel.values.items()):
        top = y + row * BAR_HEIGHT
        length = room * value / most
        parts += [
            f'<text x="{x + LABEL_WIDTH - 6}" y="{top + 12}" {_TEXT} text-anchor="end">{escape(name)}</text>',
            f'<rect x="{x + LABEL_WIDTH}" y="{top + 2}" width="{length:.1f}" height="{BAR_HEIGHT - 4}" '
            f'fill="{colours[name]}"/>',
            f'<text x="{x + LABEL_WIDTH + length + 4:.1f}" y="{top + 12}" {_TEXT}>{escape(panel.texts[name])}</text>',
        ]
    return parts


def _draw_lines(panel: LineChart, x: int, y: int, colours: Mapping[str, str]) -> list[str]:
    most = max((value for values in panel.values.values() for value in values), default=0.0) or 1.0
    bottom = y + LINES_HEIGHT
    parts = [
        f'<path d="M{x} {y}V{bottom}H{x + PANEL_WIDTH}" fill="none" stroke="#8c959f"/>',
        f'<text x="{x + 4}" y="{y - 2}" {_TEXT}>{most:.0f}</text>',
    ]
    for name, values in reversed(panel.values.items()):  # the first name on top
        step = PANEL_WIDTH / max(1, len(values) - 1)
        points = " ".join(
            f"{x + i * step:.1f},{bottom - LINES_HEIGHT * value / most:.1f}" for i, value in enumerate(values)
        )
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colours[name]}" stroke-width="1.5"/>')
    return parts


def scenario_plot(results: Sequence[ExperimentResult]) -> str:
    """Return the plot of one scenario: bars, and goodput over time."""
    return svg([(_title(results), (*_bars(results), _over_time(results)))], tuple(POLICIES))


def overview_plot(scenarios: Sequence[Sequence[ExperimentResult]]) -> str:
    """Return the bars of all scenarios, one below the other."""
    return svg([(_title(results), _bars(results)) for results in scenarios], tuple(POLICIES))


def _title(results: Sequence[ExperimentResult]) -> str:
    experiment = results[0].experiment
    return f"{experiment.scenario}: {experiment.replicas} × {experiment.machine}, {experiment.seconds:g} s"


def _bars(results: Sequence[ExperimentResult]) -> list[BarChart]:
    ttft = {result.experiment.policy: result.total.ttft.quantile(0.99) for result in results}
    itl = {result.experiment.policy: result.total.itl.quantile(0.99) for result in results}
    good = {result.experiment.policy: result.goodput for result in results}
    hits = {result.experiment.policy: result.hit_rate or 0.0 for result in results}
    return [
        BarChart(
            "time to first token, p99, ms", _known(ttft), {name: milliseconds(value) for name, value in ttft.items()}
        ),
        BarChart(
            "time between tokens, p99, ms", _known(itl), {name: milliseconds(value) for name, value in itl.items()}
        ),
        BarChart("goodput, tokens/s", good, {name: f"{value:.0f}" for name, value in good.items()}),
        BarChart(
            "prefix hits, fraction of prompt tokens", hits, {name: f"{value:.1%}" for name, value in hits.items()}
        ),
    ]


def _known(values: dict[str, float]) -> dict[str, float]:
    return {name: 0.0 if math.isnan(value) else value for name, value in values.items()}


def _over_time(results: Sequence[ExperimentResult]) -> LineChart:
    lines: dict[str, Sequence[float]] = {}
    for result in results:
        seconds = result.goodput_by_second
        width = max(1, -(-len(seconds) // POINTS))
        starts = range(0, len(seconds) - width + 1, width)
        lines[result.experiment.policy] = [sum(seconds[start : start + width]) / width for start in starts]
    return LineChart("goodput over time, tokens/s", lines)
