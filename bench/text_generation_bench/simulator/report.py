"""The result tables of a scenario, as aligned Markdown."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from text_generation_bench.simulator.experiment import ExperimentResult
from text_generation_bench.simulator.scenarios import SCENARIOS

NO_VALUE = "–"


def milliseconds(seconds: float) -> str:
    """Format a duration in milliseconds, with three significant digits."""
    if math.isnan(seconds):
        return NO_VALUE
    value = seconds * 1000
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _number(value: float) -> str:
    return f"{value:.0f}"


def _percent(share: float | None) -> str:
    return NO_VALUE if share is None else f"{share:.1%}"


def _ratio(value: float | None) -> str:
    return NO_VALUE if value is None else f"{value:.3f}"


COLUMNS: Sequence[tuple[str, Callable[[ExperimentResult], str]]] = (
    ("policy", lambda result: result.experiment.policy),
    ("done", lambda result: str(result.total.finished)),
    ("rejected", lambda result: str(result.rejected)),
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
    ("queue est.", lambda result: _ratio(result.queue_time_ratio)),
    ("busy", lambda result: _percent(result.busy)),
    ("replica h", lambda result: f"{result.replica_hours:.2f}"),
)
KIND_COLUMNS = ("policy", "kind", "sent", "done", "in target", "TTFT p50", "p99", "ITL p50", "p99", "max")

JOB_COLUMNS = ("policy", "jobs", "mean s", "share of the first policy's", "ms/token p50", "p90", "hits")
SHARE_COLUMNS = ("share of the first policy's", "goodput", "replica h")


def scenario_report(results: Sequence[ExperimentResult]) -> str:
    """Return the tables of one scenario under several policies."""
    experiment = results[0].experiment
    head = (
        f"## {experiment.scenario}\n\n{SCENARIOS[experiment.scenario].summary}; {experiment.replicas} × {experiment.machine}, "
        f"{experiment.seconds:g} s, seed {experiment.seed}. Times in ms.\n\n"
    )
    rows = [[cell(result) for _, cell in COLUMNS] for result in results]
    text = head + table([name for name, _ in COLUMNS], rows)
    if any(len(result.kinds) > 1 for result in results):
        text += "\n" + table(KIND_COLUMNS, [row for result in results for row in _kind_rows(result)])
    if results[0].job_s:
        text += "\n" + table(JOB_COLUMNS, [_job_row(result, results[0]) for result in results])
    if any(result.replica_hours < results[0].replica_hours for result in results):
        text += "\n" + table(SHARE_COLUMNS, [_shares(result, results[0]) for result in results])
    return text


def _shares(result: ExperimentResult, first: ExperimentResult) -> list[str]:
    return [
        result.experiment.policy,
        _ratio(result.goodput / max(1.0, first.goodput)),
        _ratio(result.replica_hours / first.replica_hours),
    ]


def _job_row(result: ExperimentResult, first: ExperimentResult) -> list[str]:
    mean, other = result.job_s or math.nan, first.job_s or math.nan
    return [
        result.experiment.policy,
        str(result.jobs),
        f"{mean:.1f}",
        _ratio(mean / other),
        milliseconds(result.per_token.quantile(0.5)),
        milliseconds(result.per_token.quantile(0.9)),
        _percent(result.hit_rate),
    ]


def _kind_rows(result: ExperimentResult) -> list[list[str]]:
    return [
        [
            result.experiment.policy,
            kind or "other",
            str(stats.arrived),
            str(stats.finished),
            str(stats.good),
            milliseconds(stats.ttft.quantile(0.5)),
            milliseconds(stats.ttft.quantile(0.99)),
            milliseconds(stats.itl.quantile(0.5)),
            milliseconds(stats.itl.quantile(0.99)),
            milliseconds(stats.itl.longest),
        ]
        for kind, stats in result.kinds.items()
    ]


def table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return an aligned Markdown table; all columns except the first are right-aligned."""
    widths = [max(len(row[column]) for row in (names, *rows)) for column in range(len(names))]

    def line(cells: Sequence[str]) -> str:
        first = cells[0].ljust(widths[0])
        rest = [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
        return "| " + " | ".join((first, *rest)) + " |\n"

    rule = "|" + "|".join(["-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:])]) + "|\n"
    return line(names) + rule + "".join(line(row) for row in rows)


def timing_report(result: ExperimentResult) -> str:
    """Return the processor time of the scheduler's calls, the only results that differ between runs."""
    calls = ", ".join(
        f"{name} {call.count} × {call.seconds / call.count * 1e6:.1f} µs" for name, call in result.timings if call.count
    )
    return f"{result.experiment.scenario}, {result.experiment.policy}: {result.events} events; {calls}\n"
