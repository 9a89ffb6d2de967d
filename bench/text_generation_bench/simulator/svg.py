"""Pictures without a library: bars and lines as SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

PANEL_WIDTH, BAR_HEIGHT, HEAD, GAP = 300, 18, 26, 16
LABEL_WIDTH, VALUE_WIDTH = 92, 62
LINES_HEIGHT = 150
COLOURS = ("#1f6feb", "#d1642f", "#6e7781", "#9a6fb0", "#3a8f5c", "#b08a2e", "#7d4e4e", "#4e7d7d")
_TEXT = 'font-family="sans-serif" font-size="11" fill="#24292f"'


@dataclass(frozen=True, slots=True)
class Bars:
    """One bar a name; `values` are lengths, `texts` what stands beside them."""

    title: str
    values: Mapping[str, float]
    texts: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Lines:
    """One line a name, over the same evenly spaced points; what its colour means, the bars beside it say."""

    title: str
    values: dict[str, Sequence[float]]


Panel = Bars | Lines


def picture(rows: Sequence[tuple[str, Sequence[Panel]]], names: Sequence[str]) -> str:
    """Rows of panels under their titles. A name has one colour throughout, by its place in `names`."""
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
    return HEAD + (len(panel.values) * BAR_HEIGHT if isinstance(panel, Bars) else LINES_HEIGHT)


def _panel(panel: Panel, x: int, y: int, colours: Mapping[str, str]) -> str:
    title = f'<text x="{x}" y="{y + 12}" {_TEXT}>{escape(panel.title)}</text>'
    drawn = _bars(panel, x, y + HEAD, colours) if isinstance(panel, Bars) else _lines(panel, x, y + HEAD, colours)
    return "\n".join([title, *drawn])


def _bars(panel: Bars, x: int, y: int, colours: Mapping[str, str]) -> list[str]:
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


def _lines(panel: Lines, x: int, y: int, colours: Mapping[str, str]) -> list[str]:
    most = max((value for values in panel.values.values() for value in values), default=0.0) or 1.0
    bottom = y + LINES_HEIGHT
    parts = [
        f'<path d="M{x} {y}V{bottom}H{x + PANEL_WIDTH}" fill="none" stroke="#8c959f"/>',
        f'<text x="{x + 4}" y="{y - 2}" {_TEXT}>{most:.0f}</text>',
    ]
    for name, values in reversed(panel.values.items()):  # the first one on top
        step = PANEL_WIDTH / max(1, len(values) - 1)
        points = " ".join(
            f"{x + i * step:.1f},{bottom - LINES_HEIGHT * value / most:.1f}" for i, value in enumerate(values)
        )
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colours[name]}" stroke-width="1.5"/>')
    return parts
