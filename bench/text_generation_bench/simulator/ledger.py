"""Ledger: what happened to each request, and the figures over all of them.

Every step of a span brings each of its sequences one token, so gaps between tokens are counted by spans, not by tokens:
the cost of the bookkeeping does not depend on how long the answers are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from text_generation_bench.simulator.arrivals import Arrival
from text_generation_bench.simulator.histogram import Histogram
from text_generation_bench.simulator.shard import BrokenRule, Span
from text_generation_proto.values import FailureCode, FinishReason
from text_generation_router.request import RequestId, TenantId
from text_generation_router.scheduling.steps import Deliveries, Orders

ALIKE = 0.01
"""Gaps of a span that differ by less than this share of them are counted as one."""
WORTH_FORESEEING_S = 0.1
"""Waits shorter than this are left out where foreseen waits are compared with true ones."""


@dataclass(frozen=True, slots=True)
class Targets:
    """What a client takes for good service."""

    ttft_s: float
    itl_s: float
    """99 of 100 gaps between its tokens are no longer."""


@dataclass(slots=True, eq=False)
class Figures:
    """What is counted for requests of one kind."""

    ttft: Histogram = field(default_factory=Histogram)
    itl: Histogram = field(default_factory=Histogram)
    arrived: int = 0
    finished: int = 0
    good: int = 0
    """Finished, and the client would say it was served well."""


@dataclass(slots=True, eq=False)
class Record:
    """One request that has not ended."""

    arrival: Arrival
    arrived: float
    foreseen_s: float | None
    figures: Figures
    """Of its kind."""
    replica: int = -1
    """Where it is or was last."""
    scheduled: bool = False
    first: float = -1.0
    """When its first token came."""
    last: float = 0.0
    """When its last token came, up to now."""
    tokens: int = 0
    slow: int = 0
    """Gaps longer than the target."""


@dataclass(slots=True)
class Window:
    """What happened in a second of simulated time."""

    tokens: int = 0
    """New tokens delivered."""
    prefilled: int = 0
    """Prompt tokens computed."""
    good_tokens: int = 0
    """New tokens of the requests that finished in it and were served well."""
    refused: int = 0


class Ledger:
    """Follows every request from its arrival to its end. Raises BrokenRule if one ends twice, or goes on after its end."""

    def __init__(self, targets: Targets) -> None:
        self._targets = targets
        self.live: dict[RequestId, Record] = {}
        self.kinds: dict[str, Figures] = {}
        self.windows: list[Window] = []
        self.new_tokens = 0
        """New tokens delivered."""
        self.prefilled_tokens = 0
        """Prompt tokens computed; after a preemption or a move, again."""
        self.refused = 0
        self.cancelled = 0
        self.failed: dict[FailureCode, int] = {}
        self.foreseen: list[float] = []
        """Foreseen waits as shares of the true ones."""
        self.waiting: dict[TenantId, int] = {}
        """Requests of each tenant that have never left the queue."""
        self.busy_s = 0.0
        """Seconds that replicas were in a step."""

    # ---------------------------------------------------------------------------------------------------- what happens

    def refuse(self, arrival: Arrival, now: float) -> None:
        """`arrival` was not let in."""
        self.refused += 1
        self._kind(arrival).arrived += 1
        self._window(now).refused += 1

    def arrive(self, request_id: RequestId, arrival: Arrival, now: float, foreseen_s: float | None) -> None:
        """A request was submitted."""
        figures = self._kind(arrival)
        figures.arrived += 1
        self.live[request_id] = Record(arrival, now, foreseen_s, figures)
        tenant = arrival.tenant
        self.waiting[tenant] = self.waiting.get(tenant, 0) + 1

    def order(self, replica: int, orders: Orders, now: float) -> None:
        """Orders were made for `replica`."""
        for admission in orders.admit:
            record = self.live.get(admission.request.id)
            if record is None:
                raise BrokenRule(f"request {admission.request.id} was admitted after its end")
            if len(admission.generated) != record.tokens:
                raise BrokenRule(f"request {admission.request.id} goes on from token {len(admission.generated)}")
            record.replica = replica
            if not record.scheduled:
                record.scheduled = True
                self.waiting[record.arrival.tenant] -= 1
                waited = now - record.arrived
                if record.foreseen_s is not None and waited >= WORTH_FORESEEING_S:
                    self.foreseen.append(record.foreseen_s / waited)

    def deliver(self, deliveries: Deliveries, span: Span, steps: int) -> list[Record]:
        """What the first `steps` steps of `span` brought is delivered; the requests that finished."""
        if not deliveries.tokens:
            return []
        live, target = self.live, self._targets.itl_s
        first_end = span.start + span.first_s
        end = span.start + span.seconds(steps)
        slow = _slow_steps(span, steps, target) if steps > 1 else 0
        finished: list[Record] = []
        delivered = 0
        rows: dict[Figures, int] = {}
        for request_id, first, last, reason in deliveries.tokens:
            record = live.get(request_id)
            if record is None:
                raise BrokenRule(f"request {request_id} got a token after its end")
            if last - first != steps:
                raise BrokenRule(f"request {request_id} got {last - first} tokens in {steps} steps")
            figures = record.figures
            if record.first < 0:
                record.first = first_end
                figures.ttft.add(first_end - record.arrived)
            else:
                gap = first_end - record.last
                figures.itl.add(gap)
                if gap > target:
                    record.slow += 1
            record.slow += slow
            record.last = end
            record.tokens += steps
            delivered += steps
            rows[figures] = rows.get(figures, 0) + 1
            if reason is not None:
                self._finish(request_id, record, reason, end)
                finished.append(record)
        if steps > 1:
            for figures, count in rows.items():
                _count_gaps(figures.itl, span, steps, count)
        self.new_tokens += delivered
        self._window(end).tokens += delivered
        return finished

    def compute(self, chunks: Sequence[tuple[int, int]], seconds: float, now: float) -> None:
        """Steps of so many seconds are over, with these chunks (slot, tokens) in them."""
        self.busy_s += seconds
        if chunks:
            tokens = sum([chunk for _, chunk in chunks])
            self.prefilled_tokens += tokens
            self._window(now).prefilled += tokens

    def fail(self, request_id: RequestId, kind: FailureCode) -> Record:
        """A request ended with an error."""
        self.failed[kind] = self.failed.get(kind, 0) + 1
        return self._end(request_id)

    def leave(self, request_id: RequestId) -> Record:
        """A request's client is gone."""
        self.cancelled += 1
        return self._end(request_id)

    def _finish(self, request_id: RequestId, record: Record, reason: FinishReason, now: float) -> None:
        arrival = record.arrival
        if record.tokens != arrival.new_tokens:
            raise BrokenRule(f"request {request_id} finished with {record.tokens} of {arrival.new_tokens} tokens")
        if (reason is FinishReason.LENGTH) != (arrival.new_tokens == arrival.max_new_tokens):
            raise BrokenRule(f"request {request_id} finished by {reason.value}")
        self._end(request_id)
        figures = record.figures
        figures.finished += 1
        if record.first - record.arrived <= self._targets.ttft_s and record.slow * 100 <= record.tokens:
            figures.good += 1
            self._window(now).good_tokens += record.tokens

    def _end(self, request_id: RequestId) -> Record:
        record = self.live.pop(request_id, None)
        if record is None:
            raise BrokenRule(f"request {request_id} ended twice, or never came")
        if not record.scheduled:
            self.waiting[record.arrival.tenant] -= 1
        return record

    def _kind(self, arrival: Arrival) -> Figures:
        figures = self.kinds.get(arrival.kind)
        if figures is None:
            figures = self.kinds[arrival.kind] = Figures()
        return figures

    def _window(self, now: float) -> Window:
        number = int(now)
        while len(self.windows) <= number:
            self.windows.append(Window())
        return self.windows[number]

    # --------------------------------------------------------------------------------------------------------- figures

    @property
    def total(self) -> Figures:
        """The figures over all kinds."""
        total = Figures()
        for figures in self.kinds.values():
            total.ttft.merge(figures.ttft)
            total.itl.merge(figures.itl)
            total.arrived += figures.arrived
            total.finished += figures.finished
            total.good += figures.good
        return total

    @property
    def foreseen_ratio(self) -> float | None:
        """Median of foreseen wait over true wait; None if nobody waited."""
        ratios = sorted(self.foreseen)
        return ratios[len(ratios) // 2] if ratios else None

    def rate(self, of: Callable[[Window], int], start: float, end: float) -> float:
        """What is counted in windows, a second, between two times; in whole seconds."""
        first, last = int(start), max(int(start) + 1, int(end))
        return sum(of(window) for window in self.windows[first:last]) / (last - first)


def _slow_steps(span: Span, steps: int, target: float) -> int:
    """Of the steps after the first, those longer than `target`."""
    if span.step(steps) <= target:
        return 0
    if span.step(2) > target:
        return steps - 1
    return steps - 1 - math.floor((target - span.first_s) / span.growth_s)


def _count_gaps(itl: Histogram, span: Span, steps: int, rows: int) -> None:
    """The gaps within a span, those of its steps after the first; `rows` sequences had each of them."""
    longest = span.step(steps)
    pieces = min(steps - 1, 1 + int(math.log(longest / span.first_s) / ALIKE))
    at = 1
    for piece in range(pieces):
        end = 1 + (steps - 1) * (piece + 1) // pieces
        itl.add(span.first_s + span.growth_s * (at + end - 1) / 2, (end - at) * rows)
        at = end
    itl.longest = max(itl.longest, longest)
