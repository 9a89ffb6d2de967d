"""Counters, histograms and gauges in Prometheus' text format.

Every series exists from the first scrape, with a zero, so that `rate` sees the first event. Label values are fixed when an
instrument is created: none comes from a client, and their number never grows. prometheus_client is not used because TGI's
counters have no `_total`, and because a scrape blocks the event loop, and a gateway scrapes every 50 ms: the two thousand
lines of TGI's buckets take the library more than 10 ms, and this module a tenth of one. Their names are joined ahead: the
buckets between two observations have the same count.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

DURATION_BUCKETS = tuple(0.0001 * 1.5**k for k in range(1, 36))
"""Upper bounds in seconds, 0.15 ms to 146 s: TGI's for every name that ends in `duration` (router/src/server.rs)."""


def token_buckets(largest: int) -> tuple[float, ...]:
    """TGI's bounds for counts of tokens: a hundred equal steps up to the limit."""
    return tuple(largest / 100 * step for step in range(1, 101))


class Instrument(Protocol):
    """A metric."""

    def text(self) -> str:
        """The metric in Prometheus' text format: lines, HELP and TYPE first."""
        ...


I = TypeVar("I", bound=Instrument)  # noqa: E741 - an instrument


class Registry:
    """The instruments of a scrape, in order of creation."""

    def __init__(self) -> None:
        self._instruments: list[Instrument] = []

    def add(self, instrument: I) -> I:
        """Include `instrument` in every scrape; return it."""
        self._instruments.append(instrument)
        return instrument

    def exposition(self) -> bytes:
        """All instruments in Prometheus' text format."""
        return "".join([instrument.text() for instrument in self._instruments]).encode()


class Counter:
    """A counter with one label or none."""

    def __init__(self, name: str, documentation: str, label: str = "", values: Sequence[str] = ("",)) -> None:
        self._head = head_text(name, documentation, "counter")
        self._prefixes = {value: f"{name}{_braces(label, value)} " for value in values}
        self.counts = dict.fromkeys(values, 0)

    def add(self, value: str = "", count: int = 1) -> None:
        """Count events under a label value. Raises KeyError for an undeclared value."""
        self.counts[value] += count

    def text(self) -> str:
        return self._head + "".join(f"{prefix}{self.counts[value]}\n" for value, prefix in self._prefixes.items())


class Histogram:
    """A histogram with one label or none."""

    def __init__(
        self, name: str, documentation: str, bounds: Sequence[float], label: str = "", values: Sequence[str] = ("",)
    ) -> None:
        self._head = head_text(name, documentation, "histogram")
        self._series = {value: Buckets(name, tuple(bounds), label, value) for value in values}

    def of(self, value: str = "") -> Buckets:
        """The series of a label value. Raises KeyError for an undeclared value."""
        return self._series[value]

    def observe(self, value: float, count: int = 1) -> None:
        """Add `count` observations of the same value to a histogram without a label."""
        self._series[""].observe(value, count)

    def text(self) -> str:
        return self._head + "".join([series.text() for series in self._series.values()])


class Buckets:
    """One series of a histogram: counts by bucket, and the sum of all observations."""

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
        """Add `count` observations of the same value. Upper bounds are inclusive."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def text(self) -> str:
        written: list[str] = []
        total = first = 0
        for end, count in enumerate(self._counts):
            if count:  # the buckets before it have the total so far
                written.append(f"{total}.0\n".join((*self._prefixes[first:end], "")))
                first, total = end, total + count
        written.append(f"{total}.0\n".join((*self._prefixes[first:], self._count_prefix, self._sum_prefix)))
        return f"{''.join(written)}{self._sum!r}\n"


class Reading:
    """A gauge whose value is kept elsewhere and read at each scrape."""

    def __init__(self, name: str, documentation: str, read: Callable[[], float]) -> None:
        self._name, self._documentation, self._read = name, documentation, read

    def text(self) -> str:
        return reading_text(self._name, self._documentation, "gauge", self._read())


class Readings:
    """Gauges with a label whose values are kept elsewhere and read at each scrape."""

    def __init__(
        self,
        name: str,
        documentation: str,
        label: str,
        values: Sequence[str],
        read: Callable[[], Mapping[str, float]],
    ) -> None:
        self._head = head_text(name, documentation, "gauge")
        self._prefixes = {value: f"{name}{_braces(label, value)} " for value in values}
        self._read = read

    def text(self) -> str:
        found = self._read()
        lines = (f"{prefix}{float(found.get(value, 0))!r}\n" for value, prefix in self._prefixes.items())
        return self._head + "".join(lines)


def reading_text(name: str, documentation: str, kind: str, value: float) -> str:
    """The lines of a gauge or a counter without a label."""
    return f"{head_text(name, documentation, kind)}{name} {float(value)!r}\n"


def head_text(name: str, documentation: str, kind: str) -> str:
    """The HELP and TYPE lines of a metric."""
    return f"# HELP {name} {documentation}\n# TYPE {name} {kind}\n"


def _braces(label: str, value: str) -> str:
    return f'{{{label}="{value}"}}' if label else ""
