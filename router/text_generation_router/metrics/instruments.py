"""Counters, histograms and gauges in Prometheus' text format.

Every series exists from the first scrape, with a zero, so that `rate` sees the first event; GrowingCounter is the
exception. Label values are fixed when an instrument is created, or are routes and statuses: none comes from a client.
prometheus_client is not used because TGI's counters have no `_total`, and because a scrape blocks the event loop, and a
gateway scrapes every 50 ms: the two thousand lines of TGI's buckets take the library more than 10 ms, and this module a
tenth of one. Their names are joined ahead: the buckets between two observations have the same count.
"""

import re
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ParamSpec, Protocol, TypeVar, runtime_checkable

DURATION_BUCKETS = tuple(0.0001 * 1.5**k for k in range(1, 36))
"""Upper bounds in seconds, 0.15 ms to 146 s: TGI's for every name that ends in `duration` (router/src/server.rs)."""


def token_buckets(largest: int) -> tuple[float, ...]:
    """TGI's bounds for counts of tokens: a hundred equal steps up to the limit."""
    return tuple(largest / 100 * step for step in range(1, 101))


class Instrument(Protocol):
    def text(self) -> str:
        """The metric in Prometheus' text format: lines, HELP and TYPE first."""


@runtime_checkable
class Summable(Protocol):
    """A metric of which a router with several processes shows the sum over them (snapshots.py)."""

    name: str

    def snapshot(self) -> Any:  # noqa: ANN401 - JSON
        """The values as JSON; None if all are 0."""

    def add_difference(self, now: Any, before: Any) -> None:  # noqa: ANN401 - JSON
        """Add by how much a snapshot of another process is above an earlier one of it. None is a snapshot of zeros."""


P = ParamSpec("P")
I = TypeVar("I", bound=Instrument)  # noqa: E741 - an instrument
S = TypeVar("S", bound=Summable)


class Registry:
    """The instruments of a scrape, in order of creation."""

    def __init__(self) -> None:
        self._instruments: list[Instrument] = []

    def add(self, kind: Callable[P, I], *args: P.args, **options: P.kwargs) -> I:
        """Create an instrument of a kind and include it in every scrape; return it."""
        self._instruments.append(instrument := kind(*args, **options))
        return instrument

    def texts(self, *, openmetrics: bool = False) -> Iterator[str]:
        """Yield the text of each instrument, in Prometheus' format or in OpenMetrics' with exemplars."""
        for instrument in self._instruments:
            if not openmetrics:
                yield instrument.text()
            elif isinstance(instrument, Histogram | RenamedHistogram):
                yield instrument.text(exemplars=True)
            else:
                yield _COUNTER_HEAD.sub(_openmetrics_head, instrument.text())
        if openmetrics:
            yield "# EOF\n"

    def find(self, kind: type[S], name: str) -> S:
        """The instrument of a kind with this name. Raises StopIteration if there is none."""
        return next(each for each in self.summable() if isinstance(each, kind) and each.name == name)

    def summable(self) -> Iterator[Summable]:
        """Iterate over the instruments that are summed over processes."""
        return (each for each in self._instruments if isinstance(each, Summable))


class Counter:
    """A counter with one label or none."""

    def __init__(self, name: str, documentation: str, label: str = "", values: Sequence[str] = ("",)) -> None:
        self.name = name
        self._head = head_text(name, documentation, "counter")
        self._prefixes = {value: f"{name}{labels_text({label: value} if label else {})} " for value in values}
        self.counts = dict.fromkeys(values, 0)

    def add(self, value: str = "", count: int = 1) -> None:
        """Count events under a label value. Raises KeyError for an undeclared value."""
        self.counts[value] += count

    def snapshot(self) -> dict[str, int] | None:
        return {value: count for value, count in self.counts.items() if count} or None

    def add_difference(self, now: dict[str, int] | None, before: dict[str, int] | None) -> None:
        for value, count in (now or {}).items():
            self.add(value, count - (before or {}).get(value, 0))

    def text(self) -> str:
        return self._head + "".join(f"{prefix}{self.counts[value]}\n" for value, prefix in self._prefixes.items())


class GrowingCounter(Counter):
    """A counter with several labels, whose values `add` takes as one text with spaces between them; only the first may have some.

    Unlike others, a series exists from its first event on. The caller bounds the number of values of each label.
    """

    def __init__(self, name: str, documentation: str, *labels: str) -> None:
        super().__init__(name, documentation, values=())
        self._labels = labels

    def add(self, value: str = "", count: int = 1) -> None:
        if value not in self.counts:
            labels = dict(zip(self._labels, value.rsplit(" ", len(self._labels) - 1), strict=True))
            self._prefixes[value] = f"{self.name}{labels_text(labels)} "
            self.counts[value] = 0
        super().add(value, count)


BucketsJson = tuple[float, dict[str, int], dict[str, str]]
"""A snapshot of a series of a histogram: the sum of all observations; by number of the bucket, counts and exemplars."""
NO_OBSERVATIONS: BucketsJson = 0.0, {}, {}


class Histogram:
    """A histogram with one label or none."""

    def __init__(
        self, name: str, documentation: str, bounds: Sequence[float], label: str = "", values: Sequence[str] = ("",)
    ) -> None:
        self.name, self.documentation = name, documentation
        self._head = head_text(name, documentation, "histogram")
        self._series = {value: Buckets(name, tuple(bounds), label, value) for value in values}

    def of(self, value: str = "") -> "Buckets":
        """The series of a label value. Raises KeyError for an undeclared value."""
        return self._series[value]

    def observe(self, value: float, count: int = 1, trace_id: str = "") -> None:
        """Add `count` observations of the same value to a histogram without a label; `trace_id` of an exemplar."""
        self._series[""].observe(value, count)
        if trace_id:
            self._series[""].exemplify(value, trace_id)

    def snapshot(self) -> dict[str, BucketsJson] | None:
        return {value: series.snapshot() for value, series in self._series.items() if any(series.counts)} or None

    def add_difference(self, now: dict[str, BucketsJson] | None, before: dict[str, BucketsJson] | None) -> None:
        for value, series in (now or {}).items():
            self._series[value].add_difference(series, (before or {}).get(value, NO_OBSERVATIONS))

    def text(self, *, exemplars: bool = False) -> str:
        return self._head + "".join([series.text(exemplars=exemplars) for series in self._series.values()])


class RenamedHistogram:
    """A histogram without a label under another name, with labels."""

    def __init__(self, source: Histogram, name: str, labels: Mapping[str, str]) -> None:
        self._series = source.of()
        self._head = head_text(name, source.documentation, "histogram")
        self._names = self._series.names(name, labels)

    def text(self, *, exemplars: bool = False) -> str:
        return self._head + self._series.text(self._names, exemplars=exemplars)


_SeriesNames = tuple[list[str], str, str]
"""The lines of a series of a histogram, without their values: of buckets, count and sum."""


class Buckets:
    """One series of a histogram: counts by bucket, and the sum of all observations."""

    __slots__ = ("_exemplars", "_names", "_sum", "bounds", "counts")

    def __init__(self, name: str, bounds: tuple[float, ...], label: str, value: str) -> None:
        self.bounds = bounds
        """The upper bounds of all buckets but the last, which has none."""
        self.counts = [0] * (len(bounds) + 1)
        """The observations in each bucket."""
        self._sum = 0.0
        self._names = self.names(name, {label: value} if label else {})
        self._exemplars: dict[int, str] = {}
        """By bucket: the end of its line, for the last traced observation in it."""

    def names(self, name: str, labels: Mapping[str, str]) -> _SeriesNames:
        """The lines under a name, with labels, without their values."""
        before = "".join(f"{label}," for label in _pairs(labels))
        braces = labels_text(labels)
        buckets = [f'{name}_bucket{{{before}le="{bound}"}} ' for bound in (*map(repr, self.bounds), "+Inf")]
        return buckets, f"{name}_count{braces} ", f"{name}_sum{braces} "

    def observe(self, value: float, count: int = 1) -> None:
        """Add `count` observations of the same value. Upper bounds are inclusive."""
        self.counts[bisect_left(self.bounds, value)] += count
        self._sum += value * count

    def snapshot(self) -> BucketsJson:
        """The sum, the buckets that are not empty, and the exemplars."""
        counts = {str(number): count for number, count in enumerate(self.counts) if count}
        return self._sum, counts, {str(number): text for number, text in self._exemplars.items()}

    def add_difference(self, now: BucketsJson, before: BucketsJson) -> None:
        """Add by how much a snapshot of another process is above an earlier one of it; take over its new exemplars."""
        self._sum += now[0] - before[0]
        for number, count in now[1].items():
            self.counts[int(number)] += count - before[1].get(number, 0)
        for number, exemplar in now[2].items():
            if exemplar != before[2].get(number):
                self._exemplars[int(number)] = exemplar

    def exemplify(self, value: float, trace_id: str) -> None:
        """Keep an observation of a request that is traced, as the exemplar of its bucket."""
        exemplar = f' # {{trace_id="{trace_id}"}} {value!r} {time.time_ns() / 1e9:.3f}\n'
        self._exemplars[bisect_left(self.bounds, value)] = exemplar

    def text(self, names: _SeriesNames | None = None, *, exemplars: bool = False) -> str:
        """The lines of this series, under its own names or others."""
        prefixes, count_prefix, sum_prefix = names or self._names
        written: list[str] = []
        total = first = 0
        for end, count in enumerate(self.counts):
            if count:  # the buckets before it have the total so far
                written.append(f"{total}.0\n".join((*prefixes[first:end], "")))
                first, total = end, total + count
                if exemplars and end in self._exemplars:
                    written.append(f"{prefixes[end]}{total}.0{self._exemplars[end]}")
                    first = end + 1
        written.append(f"{total}.0\n".join((*prefixes[first:], count_prefix, sum_prefix)))
        return f"{''.join(written)}{self._sum!r}\n"


class Reading:
    """A gauge, or a counter of each process, whose value is kept elsewhere and read at each scrape."""

    def __init__(self, name: str, documentation: str, read: Callable[[], float], kind: str = "gauge") -> None:
        self.name, self._documentation, self._read, self._kind = name, documentation, read, kind
        self._elsewhere = 0.0
        """The sum of the values in other processes."""

    @property
    def value(self) -> float:
        """The value now, of all processes together."""
        return self._read() + self._elsewhere

    def snapshot(self) -> float | None:
        return self._read() or None

    def add_difference(self, now: float | None, before: float | None) -> None:
        self._elsewhere += (now or 0.0) - (before or 0.0)

    def text(self) -> str:
        return reading_text(self.name, self._documentation, self._kind, self.value)


class Readings:
    """Gauges, or counters, with a label whose values are kept elsewhere and read at each scrape."""

    def __init__(
        self,
        name: str,
        documentation: str,
        label: str,
        values: Sequence[str],
        read: Callable[[], Mapping[str, float]],
        kind: str = "gauge",
    ) -> None:
        self._head = head_text(name, documentation, kind)
        self._prefixes = {value: f"{name}{labels_text({label: value})} " for value in values}
        self._read = read

    def text(self) -> str:
        found = self._read()
        lines = (f"{prefix}{float(found.get(value, 0))!r}\n" for value, prefix in self._prefixes.items())
        return self._head + "".join(lines)


def reading_text(name: str, documentation: str, kind: str, value: float, braces: str = "") -> str:
    """The lines of a gauge or a counter with one series; `braces`: its labels."""
    return f"{head_text(name, documentation, kind)}{name}{braces} {float(value)!r}\n"


def labels_text(labels: Mapping[str, str]) -> str:
    """The labels of a series in braces; "" without labels."""
    return f"{{{','.join(_pairs(labels))}}}" if labels else ""


def _pairs(labels: Mapping[str, str]) -> list[str]:
    escapes = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
    return [f'{label}="{value.translate(escapes)}"' for label, value in labels.items()]


def head_text(name: str, documentation: str, kind: str) -> str:
    """The HELP and TYPE lines of a metric."""
    return f"# HELP {name} {documentation}\n# TYPE {name} {kind}\n"


_COUNTER_HEAD = re.compile(r"^# HELP (\S+)( .*\n)# TYPE \1 counter$", re.MULTILINE)


def _openmetrics_head(found: re.Match[str]) -> str:
    """The head of a counter in OpenMetrics: without `_total`. A counter of TGI's without it is of an unknown kind there."""
    name, documentation = found.groups()
    if not name.endswith("_total"):
        return f"# HELP {name}{documentation}# TYPE {name} unknown"
    family = name.removesuffix("_total")
    return f"# HELP {family}{documentation}# TYPE {family} counter"
