"""The report: one HTML file with tables and plots, which loads nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from text_generation_bench.load.compare import Results, ratios
from text_generation_bench.load.server import version_of
from text_generation_bench.load.table import COLUMNS, LEGEND, notes, row

CHARTS = files("text_generation_router") / "dashboard" / "static"
PLOTTED = (
    "level", "value", "open_loop", "tokens_per_s", "requests_per_s", "ttft", "itl", "latency", "events_by_second", "goodput",
)  # fmt: skip


def report_page(results: Results) -> str:
    """Return the page for one or several results; plots of several show them together."""
    runs = [
        {"name": name, "levels": [{key: level[key] for key in PLOTTED if key in level} for level in result["levels"]]}
        for name, result in results
    ]
    models = list(dict.fromkeys(str(result["settings"]["model"]) for _, result in results))
    parts = {
        "TITLE": escape(f"Benchmark of {', '.join(models)}"),
        "HEAD": "".join(_head(name, result) for name, result in results),
        "TABLES": "".join(_levels(name, result["levels"]) for name, result in results) + _paragraph(LEGEND),
        "RATIOS": "".join(_paragraph(f"{title}.") + _table(title, head, rows) for title, head, rows in ratios(results)),
        "SETTINGS": "".join(_settings(name, result) for name, result in results),
        "UPLOT_CSS": (CHARTS / "uPlot.min.css").read_text(encoding="utf-8"),
        "UPLOT_JS": (CHARTS / "uPlot.iife.min.js").read_text(encoding="utf-8"),
        # No "<" in the data, so that no text can end the script element.
        "DATA": json.dumps(runs).replace("<", "\\u003c"),
    }
    template = (files("text_generation_bench.load") / "report.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{([A-Z_]+)\}\}", lambda found: parts[found[1]], template)


def _head(name: str, result: Mapping[str, Any]) -> str:
    settings, environment, server = result["settings"], result["environment"], result["server"]
    version = f", version {version_of(server)}" if version_of(server) else ""
    lines = [
        f"{name + ': ' if name else ''}{settings['dialect']} at {settings['url']}{version}, {result['time']}",
        f"Client: {environment['client']}, Python {environment['python']}, {environment['cores']} cores, {environment['system']}",
    ]
    if result["targets"]:
        lines.append("Targets: " + ", ".join(f"{key} ≤ {value * 1e3:g} ms" for key, value in result["targets"].items()))
    if result["interrupted"]:
        lines.append("Interrupted: the levels that had ended.")
    return "".join(map(_paragraph, lines))


def _paragraph(text: str, kind: str = "faint") -> str:
    return f'<p class="{kind}">{escape(text)}</p>\n'


def _levels(name: str, levels: Sequence[Mapping[str, Any]]) -> str:
    rows = [row(level) for level in levels]
    warnings = "".join(_paragraph(note, "bad") for level in levels for note in notes(level))
    return _table(f"Levels {name}", (name or COLUMNS[0], *COLUMNS[1:]), rows) + warnings


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    titles = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    lines = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>\n" for cells in rows)
    table = f"<table><thead><tr>{titles}</tr></thead><tbody>\n{lines}</tbody></table>"
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(title)}">{table}</div>\n'


def _settings(name: str, result: Mapping[str, Any]) -> str:
    text = json.dumps({key: result[key] for key in ("settings", "server", "environment")}, indent=2)
    return f"<details><summary>Settings {escape(name)}</summary><pre>{escape(text)}</pre></details>\n"
