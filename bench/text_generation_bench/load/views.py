"""Progress of a run: a live view on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol

from text_generation_bench.load.client import Progress
from text_generation_bench.load.measures import quantile
from text_generation_bench.load.table import COLUMNS, LEGEND, narrow_table, notes, row, table
from text_generation_bench.load.workload import Level

LINE_EVERY_S = 10.0
WIDTHS = (8, 8, 6, 9, 8, *(9, 7, 7, 7, 7) * 2, 8, 11, 5, 6, 6)
BARS = "▁▂▃▄▅▆▇█"
HISTORY = 48


@dataclass(frozen=True)
class Expected:
    """The amount of work of a level: requests or seconds; None: unknown."""

    requests: int | None
    seconds: float | None


class View(Protocol):
    """Shows a run."""

    def begin(self, level: Level, expected: Expected, *, is_warm_up: bool) -> None:
        """A level, or its warm-up, begins."""

    def progress(self, parts: Sequence[Progress]) -> None:
        """Take the latest progress of each process."""

    def finish(self, result: Mapping[str, Any]) -> None:
        """A level has ended."""

    def close(self) -> None:
        """The run has ended."""


class PlainView:
    """Prints a line per level, and one every ten seconds in between."""

    def __init__(self) -> None:
        self._head_printed = False
        self._rate = _Rate()
        self._name = ""
        self._expected = Expected(None, None)
        self._next_line = 0.0

    def begin(self, level: Level, expected: Expected, *, is_warm_up: bool) -> None:
        self._name = f"{level.name} (warm-up)" if is_warm_up else level.name
        self._expected = expected
        self._rate = _Rate()
        self._next_line = perf_counter() + LINE_EVERY_S

    def progress(self, parts: Sequence[Progress]) -> None:
        self._rate.update(sum(part.tokens for part in parts))
        if perf_counter() < self._next_line:
            return
        self._next_line += LINE_EVERY_S
        done, errors = sum(part.done for part in parts), sum(part.errors for part in parts)
        of = f" of {self._expected.requests}" if self._expected.requests else ""
        print(f"{self._name}: {done}{of} requests, {errors} errors, {self._rate.value:.0f} tokens/s", flush=True)

    def finish(self, result: Mapping[str, Any]) -> None:
        if not self._head_printed:
            print(table(COLUMNS, [], WIDTHS))
            self._head_printed = True
        print("\n".join([table(row(result), [], WIDTHS), *(f"  {note}" for note in notes(result))]), flush=True)

    def close(self) -> None:
        if self._head_printed:
            print(LEGEND, flush=True)


class _Rate:
    """Tokens per second over the last second or so, with its history."""

    def __init__(self) -> None:
        self._samples: list[tuple[float, int]] = [(perf_counter(), 0)]
        self.history: list[float] = []

    def update(self, tokens: int) -> None:
        self._samples = [*self._samples[-8:], (perf_counter(), tokens)]
        self.history = [*self.history[-HISTORY:], self.value]

    @property
    def value(self) -> float:
        (start, before), (end, now) = self._samples[0], self._samples[-1]
        return max(0.0, (now - before) / (end - start)) if end > start else 0.0

    def bars(self) -> str:
        most = max(self.history, default=0.0) or 1.0
        return "".join(BARS[min(len(BARS) - 1, int(value / most * len(BARS)))] for value in self.history)


class LiveView:
    """Redraws finished levels, the progress of the sweep and of the level, and the latest times, with rich."""

    def __init__(self, levels: int) -> None:
        from rich.live import Live
        from rich.progress import BarColumn, MofNCompleteColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as Bars

        self._results: list[Mapping[str, Any]] = []
        self._rate = _Rate()
        self._now = ""
        self._recent: tuple[list[float], list[float]] = ([], [])
        self._expected = Expected(None, None)
        self._began = perf_counter()
        self._bars = Bars(
            "{task.description:>20}", BarColumn(40), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
        )
        self._sweep = self._bars.add_task("levels", total=levels)
        self._level = self._bars.add_task("", total=None)
        self._live = Live(self._draw(), refresh_per_second=4)
        self._live.start()

    def begin(self, level: Level, expected: Expected, *, is_warm_up: bool) -> None:
        name = f"{level.name} warm-up" if is_warm_up else level.name
        unit = "requests" if expected.requests else "s"
        total = expected.requests or (round(expected.seconds) if expected.seconds else None)
        self._bars.reset(self._level, total=total, description=f"{name}, {unit}")
        self._expected, self._began, self._rate, self._recent = expected, perf_counter(), _Rate(), ([], [])
        self._live.update(self._draw())

    def progress(self, parts: Sequence[Progress]) -> None:
        self._rate.update(sum(part.tokens for part in parts))
        done, errors = sum(part.done for part in parts), sum(part.errors for part in parts)
        ttfts, gaps = self._recent
        ttfts += [value for part in parts for value in part.ttfts]
        gaps += [value for part in parts for value in part.gaps]
        del ttfts[:-1000], gaps[:-5000]
        completed = done if self._expected.requests else int(perf_counter() - self._began)
        self._bars.update(self._level, completed=completed)
        self._now = (
            f"{sum(part.open for part in parts)} open   {self._rate.value:,.0f} tokens/s {self._rate.bars()}\n"
            f"TTFT {_pair(ttfts, 1)} ms   ITL {_pair(gaps, 2)} ms (p50 / p99)   {errors} errors"
        )
        self._live.update(self._draw())

    def finish(self, result: Mapping[str, Any]) -> None:
        self._results.append(result)
        self._bars.update(self._sweep, advance=1)
        self._live.update(self._draw())

    def close(self) -> None:
        from rich.text import Text

        self._live.update(Text("\n".join([*self._lines(), LEGEND]) if self._results else ""))
        self._live.stop()

    def _lines(self) -> list[str]:
        rows = [row(result) for result in self._results]
        return [
            narrow_table(COLUMNS, rows, self._live.console.width),
            *(note for result in self._results for note in notes(result)),
        ]

    def _draw(self) -> Any:  # noqa: ANN401 - rich's group
        from rich.console import Group
        from rich.text import Text

        done = [Text("\n".join(self._lines()), no_wrap=True)] if self._results else []
        return Group(*done, self._bars, Text(self._now))


def _pair(values: Sequence[float], digits: int) -> str:
    if not values:
        return "– / –"
    return f"{quantile(values, 0.5) * 1e3:.{digits}f} / {quantile(values, 0.99) * 1e3:.{digits}f}"


def view_for(levels: int) -> View:
    """Return the live view on a terminal that has rich, else plain lines."""
    if not sys.stdout.isatty():
        return PlainView()
    try:
        return LiveView(levels)
    except ModuleNotFoundError:  # the extra "benchmark" is not installed
        return PlainView()
