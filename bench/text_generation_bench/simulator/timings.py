"""Timings: processor time of the scheduler's calls. The only thing here that differs from run to run."""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter


class Call:
    """How often something was called, and how long it took in all."""

    __slots__ = ("count", "seconds")

    def __init__(self) -> None:
        self.count = 0
        self.seconds = 0.0

    def add(self, since: float) -> None:
        """One call is over; `since` was `perf_counter()` before it."""
        self.seconds += perf_counter() - since
        self.count += 1


class Timings:
    """The calls that cost something."""

    def __init__(self) -> None:
        self.submit = Call()
        self.dispatch = Call()
        self.decide = Call()
        self.apply = Call()

    def __iter__(self) -> Iterator[tuple[str, Call]]:
        """By name."""
        yield "submit", self.submit
        yield "dispatch", self.dispatch
        yield "decide", self.decide
        yield "apply", self.apply
