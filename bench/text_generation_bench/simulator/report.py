"""The table of a scenario, as Markdown that reads as well as text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from text_generation_bench.simulator.play import Result
from text_generation_bench.simulator.scenarios import SCENARIOS

NOTHING = "–"


def milliseconds(seconds: float) -> str:
    """Three digits that matter."""
    if math.isnan(seconds):
        return NOTHING
    value = seconds * 1000
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _number(value: float) -> str:
    return f"{value:.0f}"


def _percent(share: float | None) -> str:
    return NOTHING if share is None else f"{share:.1%}"


def _ratio(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.3f}"


COLUMNS: Sequence[tuple[str, Callable[[Result], str]]] = (
    ("policy", lambda result: result.plan.policy),
    ("done", lambda result: str(result.total.finished)),
    ("refused", lambda result: str(result.refused)),
    ("failed", lambda result: str(result.failed)),
    ("left", lambda result: str(result.left)),
    ("TTFT p50", lambda result: milliseconds(result.total.ttft.quantile(0.5))),
    ("p99", lambda result: milliseconds(result.total.ttft.quantile(0.99))),
    ("ITL p50", lambda result: milliseconds(result.total.itl.quantile(0.5))),
    ("p99", lambda result: milliseconds(result.total.itl.quantile(0.99))),
    ("max", lambda result: milliseconds(result.total.itl.longest)),
    ("work/s", lambda result: _number(result.work_per_s)),
    ("tokens/s", lambda result: _number(result.tokens_per_s)),
    ("goodput", lambda result: _number(result.goodput)),
    ("kept", lambda result: _percent(result.goodput_kept)),
    ("hits", lambda result: _percent(result.hit_rate)),
    ("ideal", lambda result: _percent(result.ideal_hit_rate)),
    ("Jain", lambda result: _ratio(result.jain)),
    ("preempted", lambda result: str(result.preemptions)),
    ("moved", lambda result: str(result.moves)),
    ("foreseen/true", lambda result: _ratio(result.foreseen_ratio)),
    ("busy", lambda result: _percent(result.busy)),
)
KIND_COLUMNS = ("policy", "kind", "asked", "done", "well served", "TTFT p50", "p99", "ITL p50", "p99", "max")


def scenario_report(results: Sequence[Result]) -> str:
    """One scenario under several policies. The same results give the same text."""
    plan = results[0].plan
    head = (
        f"## {plan.scenario}\n\n{SCENARIOS[plan.scenario].summary}; {plan.replicas} × {plan.machine}, "
        f"{plan.seconds:g} s, seed {plan.seed}. Times in ms.\n\n"
    )
    rows = [[cell(result) for _, cell in COLUMNS] for result in results]
    text = head + table([name for name, _ in COLUMNS], rows)
    if any(len(result.kinds) > 1 for result in results):
        text += "\n" + table(KIND_COLUMNS, [row for result in results for row in _kind_rows(result)])
    return text


def _kind_rows(result: Result) -> list[list[str]]:
    return [
        [
            result.plan.policy,
            kind or "other",
            str(figures.arrived),
            str(figures.finished),
            str(figures.good),
            milliseconds(figures.ttft.quantile(0.5)),
            milliseconds(figures.ttft.quantile(0.99)),
            milliseconds(figures.itl.quantile(0.5)),
            milliseconds(figures.itl.quantile(0.99)),
            milliseconds(figures.itl.longest),
        ]
        for kind, figures in result.kinds.items()
    ]


def table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns line up; all but the first to the right."""
    widths = [max(len(row[column]) for row in (names, *rows)) for column in range(len(names))]

    def line(cells: Sequence[str]) -> str:
        first = cells[0].ljust(widths[0])
        rest = [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
        return "| " + " | ".join((first, *rest)) + " |\n"

    rule = "|" + "|".join(["-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:])]) + "|\n"
    return line(names) + rule + "".join(line(row) for row in rows)


def timing_report(result: Result) -> str:
    """What the scheduler's calls cost this machine: the only figures that differ from run to run."""
    calls = ", ".join(
        f"{name} {call.count} × {call.seconds / call.count * 1e6:.1f} µs" for name, call in result.timings if call.count
    )
    return f"{result.plan.scenario}, {result.plan.policy}: {result.events} events; {calls}\n"
