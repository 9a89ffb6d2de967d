"""What the pictures show: the four figures that policies are chosen by, and goodput over time."""

from __future__ import annotations

import math
from collections.abc import Sequence

from text_generation_bench.simulator.play import Result
from text_generation_bench.simulator.policies import POLICIES
from text_generation_bench.simulator.report import milliseconds
from text_generation_bench.simulator.svg import Bars, Lines, picture

POINTS = 60
"""Points of a line over time."""


def scenario_plot(results: Sequence[Result]) -> str:
    """One scenario: bars, and goodput over time."""
    return picture([(_title(results), (*_bars(results), _over_time(results)))], tuple(POLICIES))


def overview_plot(scenarios: Sequence[Sequence[Result]]) -> str:
    """All scenarios, one below the other."""
    return picture([(_title(results), _bars(results)) for results in scenarios], tuple(POLICIES))


def _title(results: Sequence[Result]) -> str:
    plan = results[0].plan
    return f"{plan.scenario}: {plan.replicas} × {plan.machine}, {plan.seconds:g} s"


def _bars(results: Sequence[Result]) -> list[Bars]:
    ttft = {result.plan.policy: result.total.ttft.quantile(0.99) for result in results}
    itl = {result.plan.policy: result.total.itl.quantile(0.99) for result in results}
    good = {result.plan.policy: result.goodput for result in results}
    hits = {result.plan.policy: result.hit_rate or 0.0 for result in results}
    return [
        Bars("time to first token, p99, ms", _known(ttft), {name: milliseconds(value) for name, value in ttft.items()}),
        Bars("time between tokens, p99, ms", _known(itl), {name: milliseconds(value) for name, value in itl.items()}),
        Bars("goodput, tokens/s", good, {name: f"{value:.0f}" for name, value in good.items()}),
        Bars("prefix hits, share of prompt tokens", hits, {name: f"{value:.1%}" for name, value in hits.items()}),
    ]


def _known(values: dict[str, float]) -> dict[str, float]:
    return {name: 0.0 if math.isnan(value) else value for name, value in values.items()}


def _over_time(results: Sequence[Result]) -> Lines:
    lines: dict[str, Sequence[float]] = {}
    for result in results:
        seconds = result.goodput_by_second
        width = max(1, -(-len(seconds) // POINTS))
        starts = range(0, len(seconds) - width + 1, width)
        lines[result.plan.policy] = [sum(seconds[start : start + width]) / width for start in starts]
    return Lines("goodput over time, tokens/s", lines)
