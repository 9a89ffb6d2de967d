"""What counts and how it is written down: Prometheus' text format, by hand.

Every series is there from the first scrape, with a zero, so that `rate` sees the first event. Label values are fixed when
an instrument is made: none comes from a client, and their number never grows. Written here and not by prometheus_client
because TGI's counters carry no `_total`, and because a scrape stops the event loop: the two thousand lines that TGI's
buckets make take the library more than 10 ms, and this well under one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Protocol


class Instrument(Protocol):
    """Something that a scrape reads."""

    def lines(self) -> list[str]:
        """Its lines in Prometheus' text format, HELP and TYPE first."""
        ...


class Counter:
    """Counts events, by the values of one label or without any."""

    def __init__(self, name: str, documentation: str, label: str = "", values: Sequence[str] = ("",)) -> None:
        self._head = _head(name, documentation, "counter")
        self._prefixes = {value: f"{name}{_braces(label, value)} " for value in values}
        self.counts = dict.fromkeys(values, 0)

    def add(self, value: str = "", count: int = 1) -> None:
        """`value` is one of the label's. Raises KeyError for any other."""
        self.counts[value] += count

    def lines(self) -> list[str]:
        return [*self._head, *(prefix + repr(self.counts[value]) for value, prefix in self._prefixes.items())]


class Histogram:
    """Counts observations by bucket, by the values of one label or without any."""

    def __init__(
        self, name: str, documentation: str, bounds: Sequence[float], label: str = "", values: Sequence[str] = ("",)
    ) -> None:
        self._head = _head(name, documentation, "histogram")
        self._series = {value: Buckets(name, tuple(bounds), label, value) for value in values}

    def of(self, value: str = "") -> Buckets:
        """The series of one of the label's values. Raises KeyError for any other."""
        return self._series[value]

    def observe(self, value: float, count: int = 1) -> None:
        """`count` observations of the same value, by a histogram without a label."""
        self._series[""].observe(value, count)

    def lines(self) -> list[str]:
        return [*self._head, *(line for series in self._series.values() for line in series.lines())]


class Buckets:
    """One series of a histogram: observations by bucket, and their sum."""

    __slots__ = ("_bounds", "_count_prefix", "_counts", "_prefixes", "_sum", "_sum_prefix")

    def __init__(self, name: str, bounds: tuple[float, ...], label: str, value: str) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        before = f'{label}="{value}",' if label else ""
        self._prefixes = [f'{name}_bucket{{{before}le="{bound}"}} ' for bound in (*map(repr, bounds), "+Inf")]
        self._count_prefix = f"{name}_count{_braces(label, value)} "
        self._sum_prefix = f"{name}_sum{_braces(label, value)} "

    def observe(self, value: float, count: int = 1) -> None:
        """`count` observations of the same value; it belongs to the first bucket whose bound is not below it."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def lines(self) -> list[str]:
        totals = list(accumulate(self._counts))
        written = [f"{prefix}{total}.0" for prefix, total in zip(self._prefixes, totals, strict=True)]
        written += (f"{self._count_prefix}{totals[-1]}.0", f"{self._sum_prefix}{self._sum!r}")
        return written


class Reading:
    """A figure that somebody else keeps, read when it is scraped: a gauge, or a counter that only ever rises."""

    def __init__(self, name: str, documentation: str, read: Callable[[], float], kind: str = "gauge") -> None:
        self._head = _head(name, documentation, kind)
        self._prefix = f"{name} "
        self._read = read

    def lines(self) -> list[str]:
        return [*self._head, f"{self._prefix}{float(self._read())!r}"]


def _head(name: str, documentation: str, kind: str) -> tuple[str, str]:
    return f"# HELP {name} {documentation}", f"# TYPE {name} {kind}"


def _braces(label: str, value: str) -> str:
    return f'{{{label}="{value}"}}' if label else ""
