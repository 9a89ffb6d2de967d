"""Statistics of a simulation: the state of each request, latencies and rates over all, time spent in the scheduler.

Each step of a span gives each of its sequences one token, so gaps between tokens are counted per span, not per token:
the cost does not depend on the length of answers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter

from text_generation_bench.simulator.config import LatencyTargets
from text_generation_bench.simulator.measures import DurationHistogram
from text_generation_bench.simulator.shard import RuleViolation, StepSpan
from text_generation_bench.simulator.traces import Arrival
from text_generation_proto.values import FailureCode, FinishReason
from text_generation_router.request import RequestId, TenantId
from text_generation_router.scheduling.messages import Deliveries, SchedulerOutput

GAP_RESOLUTION = 0.01
"""Gaps of a span that differ by less than this fraction are counted together."""
MIN_COMPARED_WAIT_S = 0.1
"""Shorter waits are not compared with their estimates."""


@dataclass(slots=True, eq=False)
class RequestStats:
    """Counts and latencies of requests of one kind."""

    ttft: DurationHistogram = field(default_factory=DurationHistogram)
    itl: DurationHistogram = field(default_factory=DurationHistogram)
    arrived: int = 0
    finished: int = 0
    good: int = 0
    """Finished within the latency targets."""


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request that has not ended."""

    arrival: Arrival
    arrived: float
    estimated_s: float | None
    stats: RequestStats
    """Statistics of its kind."""
    replica: int = -1
    """Index of its current or last replica; -1: none yet."""
    scheduled: bool = False
    first: float = -1.0
    """Time of its first token; negative: none yet."""
    last: float = 0.0
    """Time of its latest token."""
    tokens: int = 0
    slow: int = 0
    """Number of gaps longer than the target."""


@dataclass(slots=True)
class SecondStats:
    """Counts of one second of simulated time."""

    tokens: int = 0
    """New tokens delivered."""
    prefilled: int = 0
    """Prompt tokens computed."""
    good_tokens: int = 0
    """New tokens of the requests that finished in it within the latency targets."""
    rejected: int = 0


class Statistics:
    """Follows every request from arrival to end. Raises RuleViolation if one ends twice or continues after its end."""

    def __init__(self, targets: LatencyTargets) -> None:
        self._targets = targets
        self.live: dict[RequestId, LiveRequest] = {}
        self.kinds: dict[str, RequestStats] = {}
        self.seconds: list[SecondStats] = []
        self.new_tokens = 0
        """New tokens delivered."""
        self.prefilled_tokens = 0
        """Prompt tokens computed, including recomputation after a preemption or move."""
        self.rejected = 0
        self.cancelled = 0
        self.failed: dict[FailureCode, int] = {}
        self.queue_time_ratios: list[float] = []
        """Ratios of estimated to actual queue time."""
        self.waiting: dict[TenantId, int] = {}
        """Number of each tenant's requests that have never left the queue."""
        self.jobs: dict[str, tuple[float, float]] = {}
        """The first arrival and the last end of each job."""
        self.per_token = DurationHistogram()
        """Seconds from arrival to end over new tokens, of each request."""
        self.busy_s = 0.0
        """Total duration of all steps, in seconds."""

    # ---------------------------------------------------------------------------------------------------- what happens

    def reject(self, arrival: Arrival, now: float) -> None:
        """Count a rejected request."""
        self.rejected += 1
        self._kind(arrival).arrived += 1
        self._second(now).rejected += 1

    def arrive(self, request_id: RequestId, arrival: Arrival, now: float, estimated_s: float | None) -> None:
        """Add a submitted request."""
        stats = self._kind(arrival)
        stats.arrived += 1
        self.live[request_id] = LiveRequest(arrival, now, estimated_s, stats)
        if arrival.job:
            self.jobs.setdefault(arrival.job, (now, now))
        tenant = arrival.tenant
        self.waiting[tenant] = self.waiting.get(tenant, 0) + 1

    def order(self, replica: int, orders: SchedulerOutput, now: float) -> None:
        """Record the orders for a replica."""
        for admission in orders.placements:
            record = self.live.get(admission.request.id)
            if record is None:
                raise RuleViolation(f"request {admission.request.id} was admitted after its end")
            if len(admission.generated) != record.tokens:
                raise RuleViolation(f"request {admission.request.id} goes on from token {len(admission.generated)}")
            record.replica = replica
            if not record.scheduled:
                record.scheduled = True
                self.waiting[record.arrival.tenant] -= 1
                waited = now - record.arrived
                if record.estimated_s is not None and waited >= MIN_COMPARED_WAIT_S:
                    self.queue_time_ratios.append(record.estimated_s / waited)

    def deliver(self, deliveries: Deliveries, span: StepSpan, steps: int) -> list[LiveRequest]:
        """Record the tokens of the first `steps` steps of a span; return the requests that finished."""
        if not deliveries.tokens:
            return []
        live, target = self.live, self._targets.itl_s
        first_end = span.start + span.first_s
        end = span.start + span.seconds(steps)
        slow = _slow_steps(span, steps, target) if steps > 1 else 0
        finished: list[LiveRequest] = []
        delivered = 0
        rows: dict[RequestStats, int] = {}
        for request_id, first, last, reason in deliveries.tokens:
            record = live.get(request_id)
            if record is None:
                raise RuleViolation(f"request {request_id} got a token after its end")
            if last - first != steps:
                raise RuleViolation(f"request {request_id} got {last - first} tokens in {steps} steps")
            stats = record.stats
            if record.first < 0:
                record.first = first_end
                stats.ttft.add(first_end - record.arrived)
            else:
                gap = first_end - record.last
                stats.itl.add(gap)
                if gap > target:
                    record.slow += 1
            record.slow += slow
            record.last = end
            record.tokens += steps
            delivered += steps
            rows[stats] = rows.get(stats, 0) + 1
            if reason is not None:
                self._finish(request_id, record, reason, end)
                finished.append(record)
        if steps > 1:
            for stats, count in rows.items():
                _count_gaps(stats.itl, span, steps, count)
        self.new_tokens += delivered
        self._second(end).tokens += delivered
        return finished

    def compute(self, chunks: Sequence[tuple[int, int]], seconds: float, now: float) -> None:
        """Count finished steps with their total duration and their chunks (slot, tokens)."""
        self.busy_s += seconds
        if chunks:
            tokens = sum([chunk for _, chunk in chunks])
            self.prefilled_tokens += tokens
            self._second(now).prefilled += tokens

    def fail(self, request_id: RequestId, kind: FailureCode) -> LiveRequest:
        """Count a request that ended with an error."""
        self.failed[kind] = self.failed.get(kind, 0) + 1
        return self._end(request_id)

    def leave(self, request_id: RequestId) -> LiveRequest:
        """Count a request whose client left."""
        self.cancelled += 1
        return self._end(request_id)

    def _finish(self, request_id: RequestId, record: LiveRequest, reason: FinishReason, now: float) -> None:
        arrival = record.arrival
        if record.tokens != arrival.new_tokens:
            raise RuleViolation(f"request {request_id} finished with {record.tokens} of {arrival.new_tokens} tokens")
        if (reason is FinishReason.LENGTH) != (arrival.new_tokens == arrival.max_new_tokens):
            raise RuleViolation(f"request {request_id} finished by {reason.value}")
        self._end(request_id)
        stats = record.stats
        stats.finished += 1
        self.per_token.add((now - record.arrived) / record.tokens)
        if arrival.job:
            self.jobs[arrival.job] = self.jobs[arrival.job][0], now
        if record.first - record.arrived <= self._targets.ttft_s and record.slow * 100 <= record.tokens:
            stats.good += 1
            self._second(now).good_tokens += record.tokens

    def _end(self, request_id: RequestId) -> LiveRequest:
        record = self.live.pop(request_id, None)
        if record is None:
            raise RuleViolation(f"request {request_id} ended twice, or never came")
        if not record.scheduled:
            self.waiting[record.arrival.tenant] -= 1
        return record

    def _kind(self, arrival: Arrival) -> RequestStats:
        stats = self.kinds.get(arrival.kind)
        if stats is None:
            stats = self.kinds[arrival.kind] = RequestStats()
        return stats

    def _second(self, now: float) -> SecondStats:
        number = int(now)
        while len(self.seconds) <= number:
            self.seconds.append(SecondStats())
        return self.seconds[number]

    # --------------------------------------------------------------------------------------------------------- stats

    @property
    def total(self) -> RequestStats:
        """Statistics over all kinds."""
        total = RequestStats()
        for stats in self.kinds.values():
            total.ttft.merge(stats.ttft)
            total.itl.merge(stats.itl)
            total.arrived += stats.arrived
            total.finished += stats.finished
            total.good += stats.good
        return total

    @property
    def queue_time_ratio(self) -> float | None:
        """Median of estimated over actual queue time; None if no request waited."""
        ratios = sorted(self.queue_time_ratios)
        return ratios[len(ratios) // 2] if ratios else None

    def rate(self, of: Callable[[SecondStats], int], start: float, end: float) -> float:
        """Return the mean of a count per second between two times, over whole seconds."""
        first, last = int(start), max(int(start) + 1, int(end))
        return sum(of(second) for second in self.seconds[first:last]) / (last - first)


def _slow_steps(span: StepSpan, steps: int, target: float) -> int:
    """Return the number of steps after the first that are longer than `target`."""
    if span.step(steps) <= target:
        return 0
    if span.step(2) > target:
        return steps - 1
    return steps - 1 - math.floor((target - span.first_s) / span.growth_s)


def _count_gaps(itl: DurationHistogram, span: StepSpan, steps: int, rows: int) -> None:
    """Count the gaps within a span, which are its steps after the first, for `rows` sequences."""
    longest = span.step(steps)
    pieces = min(steps - 1, 1 + int(math.log(longest / span.first_s) / GAP_RESOLUTION))
    at = 1
    for piece in range(pieces):
        end = 1 + (steps - 1) * (piece + 1) // pieces
        itl.add(span.first_s + span.growth_s * (at + end - 1) / 2, (end - at) * rows)
        at = end
    itl.longest = max(itl.longest, longest)


class CallTimer:
    """Number and total processor time of the calls of one function."""

    __slots__ = ("count", "seconds")

    def __init__(self) -> None:
        self.count = 0
        self.seconds = 0.0

    def add(self, since: float) -> None:
        """Count a call; `since` was `perf_counter()` before it."""
        self.seconds += perf_counter() - since
        self.count += 1


class SchedulerTimings:
    """Processor time of the scheduler's calls. The only result that differs between runs."""

    def __init__(self) -> None:
        self.submit = CallTimer()
        self.dispatch = CallTimer()
        self.decide = CallTimer()
        self.apply = CallTimer()

    def __iter__(self) -> Iterator[tuple[str, CallTimer]]:
        """Yield names and timers."""
        yield "submit", self.submit
        yield "dispatch", self.dispatch
        yield "decide", self.decide
        yield "apply", self.apply
