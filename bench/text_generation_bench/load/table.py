"""Tables and lines for the terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from text_generation_bench.load.measures import client_warning

COLUMNS = (
    "level", "requests", "errors", "tokens/s", "req/s", "TTFT mean", "p50", "p90", "p95", "p99",
    "ITL mean", "p50", "p90", "p95", "p99", "TPOT p50", "latency p50", "good",
    "ev/tok", "client",
)  # fmt: skip
LEAST = ("p90", "p95", "ev/tok", "requests", "TPOT p50", "req/s", "latency p50", "good")
"""Columns that a narrow terminal does without, in this order."""
LEGEND = (
    "level: requests kept open, or sent a second; TTFT, ITL, TPOT: ms to the first event, between events, per token after it;\n"
    "latency: s; good: share of the requests that hold all targets; ev/tok: events per token; client: CPU of the busiest process"
)


def row(result: Mapping[str, Any]) -> list[str]:
    """Return the cells of a level."""
    ttft, itl, tpot, latency = (result[name] for name in ("ttft", "itl", "tpot", "latency"))
    return [
        result["level"],
        str(result["requests"]),
        str(result["errors"]),
        f"{result['tokens_per_s']:.1f}",
        f"{result['requests_per_s']:.2f}",
        *(milliseconds(ttft, name, 1) for name in ("mean", "p50", "p90", "p95", "p99")),
        *(milliseconds(itl, name, 2) for name in ("mean", "p50", "p90", "p95", "p99")),
        milliseconds(tpot, "p50", 2),
        f"{latency['p50']:.2f}" if latency["count"] else "–",
        f"{result['goodput']['share']:.0%}" if "goodput" in result else "–",
        f"{result['events_per_token']:.2f}" + ("" if result["tokens_counted"] else "?"),
        f"{result['client']['cpu']:.0%}",
    ]


def milliseconds(times: Mapping[str, Any], name: str, digits: int) -> str:
    """Return a quantile in ms; a dash if there is none."""
    value = times.get(name, math.nan) * 1e3
    return "–" if math.isnan(value) else f"{value:.{digits}f}"


def notes(result: Mapping[str, Any]) -> list[str]:
    """Return the errors of a level by text, and the warnings about its measurement."""
    lines = [f"{result['level']}: {count} × {text}" for text, count in result["error_texts"].items()]
    if agents := result.get("agents"):
        per_token = agents["seconds_per_token"]
        times = f"{milliseconds(per_token, 'p50', 1)} (p50), {milliseconds(per_token, 'p90', 1)} (p90) ms from end to end a new token"
        lines.append(
            f"{result['level']}: {times}; {agents['hit_rate']:.1%} hits; {agents['served']} of {agents['sessions']} sessions served"
        )
    if reason := client_warning(result):
        lines.append(
            f"{result['level']}: warning: the client may be the bottleneck: {reason}; use --processes or a free core"
        )
    if not result["tokens_counted"]:
        lines.append(f"{result['level']}: the server does not count its tokens: each event counts as one")
    return lines


def table(head: Sequence[str], rows: Sequence[Sequence[str]], widths: Sequence[int] | None = None) -> str:
    """Return aligned columns; the first is text, the others are numbers."""
    widths = widths or [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if at == 0 else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        for cells in (head, *rows)
    ]
    return "\n".join(lines)


def narrow_table(head: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> str:
    """Return a table without the columns of LEAST that do not fit into `width` letters."""
    columns = list(zip(head, *rows, strict=True))
    for name in LEAST:
        if sum(max(map(len, column)) + 2 for column in columns) - 2 <= width:
            break
        columns = [column for column in columns if column[0] != name]
    head, *rows = zip(*columns, strict=True)
    return table(head, rows)
