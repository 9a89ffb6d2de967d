"""Comparison of result files on the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from text_generation_bench.load.run import FORMAT
from text_generation_bench.load.server import version_of
from text_generation_bench.load.settings import fail
from text_generation_bench.load.table import COLUMNS, LEGEND, notes, row, table

RATIOS = (
    ("tokens/s", lambda level: level["tokens_per_s"]),
    ("req/s", lambda level: level["requests_per_s"]),
    ("TTFT p50", lambda level: level["ttft"].get("p50")),
    ("TTFT p99", lambda level: level["ttft"].get("p99")),
    ("ITL p50", lambda level: level["itl"].get("p50")),
    ("ITL p99", lambda level: level["itl"].get("p99")),
    ("TPOT p50", lambda level: level["tpot"].get("p50")),
    ("latency p50", lambda level: level["latency"].get("p50")),
)
FEW = 100
"""Values from which on the p99 is not the largest of them."""
Results = Sequence[tuple[str, Mapping[str, Any]]]
"""Result files with their names."""


def read_results(paths: Sequence[Path]) -> Results:
    """Return the content of result files; one line and an exit for a file that is none."""
    results = []
    for path in paths:
        try:
            value = orjson.loads(path.read_bytes())
        except OSError as error:
            fail(f"--compare: {path}: {error.strerror}")
        except ValueError as error:
            fail(f"--compare: {path}: no JSON: {error}")
        if not isinstance(value, dict) or value.get("format") != FORMAT:
            fail(f"--compare: {path}: not written by text-generation-benchmark --output")
        results.append((path.stem, value))
    names = [name for name, _ in results]
    if len(set(names)) < len(names):
        return [(str(path), value) for path, (_, value) in zip(paths, results, strict=True)]
    return results


def comparison(results: Results) -> str:
    """Return the table of each file, and the ratios of the levels that later files share with the first."""
    parts = []
    for name, result in results:
        server, levels = result["server"], result["levels"]
        parts.append(
            f"{name}: {result['settings']['model']}, {result['settings']['dialect']}, {result['time']}{_version(server)}"
        )
        parts.append(table(COLUMNS, [row(level) for level in levels]))
        parts += [note for level in levels for note in notes(level)]
    parts.append(LEGEND)
    for title, head, rows in ratios(results):
        parts += [f"\n{title}", table(head, rows) if rows else "no level in common"]
    return "\n".join(parts)


def ratios(results: Results) -> list[tuple[str, list[str], list[list[str]]]]:
    """Return, for each result after the first, a title, the head of a table and its rows: the ratios of the levels in common."""
    (first, base), *others = results
    tables = []
    for name, other in others:
        differing = _differing(base["settings"], other["settings"])
        title = f"{name} divided by {first}" + (f"; they differ in {', '.join(differing)}" if differing else "")
        rows = [
            [
                level["level"],
                *(f"{_ratio(level, found, of)}{'?' * _rests_on_few(name, level, found)}" for name, of in RATIOS),
            ]
            for level in other["levels"]
            for found in base["levels"]
            if found["level"] == level["level"]
        ]
        if any(cell.endswith("?") for cells in rows for cell in cells):
            title += f". Warning: a p99 of fewer than {FEW} values is nearly the largest of them: marked with ?"
        tables.append((title, ["level", *(column for column, _ in RATIOS)], rows))
    return tables


def _ratio(level: Mapping[str, Any], base: Mapping[str, Any], of: Any) -> str:  # noqa: ANN401 - a function of RATIOS
    value, reference = of(level), of(base)
    return f"{value / reference:.3f}" if value is not None and reference else "–"


def _rests_on_few(column: str, *levels: Mapping[str, Any]) -> bool:
    """Return True for a p99 of so few values that it is nearly the largest of them."""
    measure, _, quantile = column.partition(" ")
    return quantile == "p99" and min(level[measure.lower()]["count"] for level in levels) < FEW


def _differing(base: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the settings of the load that differ; address, key and seed may."""
    ignored = {"url", "seed", "model", "header", "tls_ca", "tls_cert", "tls_key", "insecure"}
    names = (base.keys() | other.keys()) - ignored
    return sorted(f"--{name.replace('_', '-')}" for name in names if base.get(name) != other.get(name))


def _version(server: Mapping[str, Any]) -> str:
    return f", server {version}" if (version := version_of(server)) else ""
