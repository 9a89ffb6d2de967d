"""Prometheus metrics under TGI's names, so that its dashboards and alerts go on working.

Counting is ours and touched once a request, never once a token; writing them down is prometheus_client's. Counters are
written here because TGI's carry no `_total`, which the library insists on.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

DURATION_BUCKETS = tuple(0.0001 * 1.5**k for k in range(1, 36))
"""Seconds: 0.15 ms to 146 s."""


class Histogram:
    """Counts observations by bucket."""

    def __init__(self, name: str, documentation: str, bounds: Sequence[float]) -> None:
        self.name = name
        self.documentation = documentation
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """A value belongs to the first bucket whose bound is not below it."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def family(self) -> HistogramMetricFamily:
        """As prometheus_client has it: cumulative."""
        labels = [*(repr(bound) for bound in self._bounds), "+Inf"]
        buckets = list(zip(labels, map(float, accumulate(self._counts)), strict=True))
        return HistogramMetricFamily(self.name, self.documentation, buckets=buckets, sum_value=self._sum)


@dataclass(frozen=True, slots=True)
class Spent:
    """Where a finished request's time went, in seconds, and what came of it."""

    total_s: float
    validation_s: float
    queue_s: float
    inference_s: float
    generated_tokens: int

    @property
    def per_token_s(self) -> float:
        return self.inference_s / max(self.generated_tokens, 1)


class Metrics(Collector):
    """Every metric of the router. Each request that started ends as one success or one failure."""

    def __init__(
        self,
        *,
        max_input_tokens: int,
        max_total_tokens: int,
        queue_size: Callable[[], int],
        batch_size: Callable[[], int],
    ) -> None:
        self._gauges = (
            ("tgi_queue_size", "Requests waiting in the queue", queue_size),
            ("tgi_batch_current_size", "Requests running", batch_size),
        )
        self._started = 0
        self._succeeded = 0
        self._failed: dict[str, int] = {}
        self.input_length = Histogram("tgi_request_input_length", "Prompt tokens", _steps(max_input_tokens))
        self.max_new_tokens = Histogram("tgi_request_max_new_tokens", "New tokens asked for", _steps(max_total_tokens))
        self._generated = Histogram("tgi_request_generated_tokens", "New tokens", _steps(max_total_tokens))
        self._total = _duration("tgi_request_duration", "Seconds from arrival to end")
        self._validation = _duration("tgi_request_validation_duration", "Seconds from arrival to the queue")
        self._queue = _duration("tgi_request_queue_duration", "Seconds in the queue")
        self._inference = _duration("tgi_request_inference_duration", "Seconds from leaving the queue to the end")
        self._per_token = _duration("tgi_request_mean_time_per_token_duration", "Seconds of inference a new token")
        self._histograms = (
            self._total,
            self._validation,
            self._queue,
            self._inference,
            self._per_token,
            self._generated,
            self.input_length,
            self.max_new_tokens,
        )
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def request_started(self) -> None:
        """A generation was asked for."""
        self._started += 1

    def request_succeeded(self, spent: Spent) -> None:
        """It ended as it should."""
        self._succeeded += 1
        self._total.observe(spent.total_s)
        self._validation.observe(spent.validation_s)
        self._queue.observe(spent.queue_s)
        self._inference.observe(spent.inference_s)
        self._per_token.observe(spent.per_token_s)
        self._generated.observe(spent.generated_tokens)

    def request_failed(self, reason: str) -> None:
        """It did not; `reason` is one of a handful of words."""
        self._failed[reason] = self._failed.get(reason, 0) + 1

    def exposition(self) -> bytes:
        """Everything, in Prometheus' text format."""
        return generate_latest(self._registry) + self._counters().encode()

    def collect(self) -> Iterator[Metric]:
        """prometheus_client's hook: all but the counters."""
        for name, documentation, read in self._gauges:
            yield GaugeMetricFamily(name, documentation, value=read())
        for histogram in self._histograms:
            yield histogram.family()

    def _counters(self) -> str:
        failures = "".join(
            f'tgi_request_failure{{err="{reason}"}} {count}\n' for reason, count in sorted(self._failed.items())
        )
        return (
            "# HELP tgi_request_count Generations asked for\n# TYPE tgi_request_count counter\n"
            f"tgi_request_count {self._started}\n"
            "# HELP tgi_request_success Generations that ended as they should\n# TYPE tgi_request_success counter\n"
            f"tgi_request_success {self._succeeded}\n"
            "# HELP tgi_request_failure Generations that failed, by reason\n# TYPE tgi_request_failure counter\n"
            f"{failures}"
        )


def _duration(name: str, documentation: str) -> Histogram:
    return Histogram(name, documentation, DURATION_BUCKETS)


def _steps(largest: int) -> list[float]:
    return [largest / 100 * step for step in range(1, 101)]
