"""Metrics of generations: requested, finished, latencies.

    started ──► succeeded (length, eos_token, stop_sequence)
            └─► failed    (refused, error, expired, cancelled)

Each generation that starts ends once, so whenever nothing runs tgi_request_count = tgi_request_success +
tgi_request_failure, and started = finished by reason. `api/http/record.py` defines a generation: TGI counts the requests of
some routes twice, once for the handler and once for the generation in it, and never counts tool errors.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from text_generation_proto.values import FinishReason
from text_generation_router.error_attributes import Outcome
from text_generation_router.errors import IncompleteGeneration, ServingError, error_classes
from text_generation_router.metrics.instruments import (
    DURATION_BUCKETS,
    Buckets,
    Counter,
    Histogram,
    Registry,
    token_buckets,
)

FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 300.0),
)
"""Seconds: fine around the usual targets, and long enough for a queue."""


@dataclass(frozen=True, slots=True)
class Latencies:
    """Latency breakdown of a finished generation, in seconds, and its length."""

    total_s: float
    validation_s: float
    queue_s: float
    inference_s: float
    generated_tokens: int
    prefill_s: float = 0.0
    """From leaving the queue to the first token."""
    decode_s: float = 0.0
    """From the first to the last token."""

    @property
    def per_token_s(self) -> float:
        return self.inference_s / max(self.generated_tokens, 1)


class RequestMetrics:
    """tgi_request_* and related metrics, updated once or twice per generation, never per token."""

    def __init__(self, registry: Registry, max_input_tokens: int, max_total_tokens: int) -> None:
        def duration(name: str, documentation: str) -> Histogram:
            return registry.add(Histogram, name, documentation, DURATION_BUCKETS)

        def seconds(name: str, documentation: str) -> Histogram:
            return registry.add(Histogram, name, documentation, FIRST_TOKEN_BUCKETS)

        def tokens(name: str, documentation: str, largest: int) -> Histogram:
            return registry.add(Histogram, name, documentation, token_buckets(largest))

        def counter(name: str, documentation: str, label: str = "", *values: str) -> Counter:
            return registry.add(Counter, name, documentation, label, tuple(dict.fromkeys(values)) or ("",))

        labels = [error.metric_label for error in error_classes()]
        reasons = [*(reason.value for reason in FinishReason), *(outcome.value for outcome in Outcome)]
        self._count = counter("tgi_request_count", "Generations requested")
        self._success = counter("tgi_request_success", "Generations that succeeded")
        self._failure = counter("tgi_request_failure", "Generations that failed, by error", "err", *labels)
        self._latencies = {
            "total_s": duration("tgi_request_duration", "Seconds from arrival to end"),
            "validation_s": duration("tgi_request_validation_duration", "Seconds from arrival to the queue"),
            "queue_s": duration("tgi_request_queue_duration", "Seconds in the queue"),
            "inference_s": duration("tgi_request_inference_duration", "Seconds from leaving the queue to the end"),
            "per_token_s": duration("tgi_request_mean_time_per_token_duration", "Seconds of inference per new token"),
            "prefill_s": seconds(
                "text_generation_request_prefill_seconds", "Seconds from leaving the queue to the first new token"
            ),
            "decode_s": seconds(
                "text_generation_request_decode_seconds", "Seconds from the first to the last new token"
            ),
        }
        """By field of Latencies."""
        self._generated = tokens("tgi_request_generated_tokens", "New tokens", max_total_tokens)
        self.input_length = tokens("tgi_request_input_length", "Prompt tokens", max_input_tokens)
        self.max_new_tokens = tokens("tgi_request_max_new_tokens", "New tokens requested", max_total_tokens)
        self.first_token_seconds = seconds(
            "text_generation_time_to_first_token_seconds",
            "Seconds from arrival to the first new token, the queue included",
        )
        self._started = counter("text_generation_requests_started_total", "Generations requested")
        self.finished = counter(
            "text_generation_requests_finished_total",
            "Generations that ended, by reason; refused ones never reached the queue",
            "reason",
            *reasons,
        )
        self._cancelled = counter(
            "text_generation_requests_cancelled_total", "Generations whose client left before the response was complete"
        )

    @property
    def first_token_times(self) -> Buckets:
        """The counts of times to first token, for the dashboard."""
        return self.first_token_seconds.of()

    def started(self) -> None:
        self._count.add()
        self._started.add()

    def succeeded(self, latencies: Latencies, reason: FinishReason, trace_id: str = "") -> None:
        """Count a generation that succeeded; `trace_id` if it is traced."""
        self._success.add()
        self.finished.add(reason.value)
        for field, histogram in self._latencies.items():
            histogram.observe(getattr(latencies, field), trace_id=trace_id)
        self._generated.observe(latencies.generated_tokens)

    def failed(self, error: type[ServingError], count: int = 1) -> None:
        self._failure.add(error.metric_label, count)
        self.finished.add(error.outcome.value, count)
        if error.outcome is Outcome.CANCELLED:
            self._cancelled.add(count=count)

    def abandoned(self, values: Mapping[str, Mapping[str, int]]) -> None:
        """Count the generations that a process ran when it died, according to its last snapshot."""
        started, finished = (values.get(each.name, {}) for each in (self._started, self.finished))
        self.failed(IncompleteGeneration, sum(started.values()) - sum(finished.values()))
