"""The metrics of generations: what was asked for, how it ended, where its time went.

    started ──► succeeded (length, eos_token, stop_sequence)
            └─► failed    (refused, error, expired, cancelled)

Each generation that started ends once, so tgi_request_count = tgi_request_success + tgi_request_failure, and started =
finished by reason, whenever nothing runs. What counts as one is said in api/http/record.py: TGI counts some routes' requests
twice, once for the handler and once for the generation in it, and its tool errors never.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from text_generation_proto.values import FinishReason
from text_generation_router.metrics.buckets import DURATION_BUCKETS, FIRST_TOKEN_BUCKETS, token_buckets
from text_generation_router.metrics.instruments import Counter, Histogram, Instrument

CANCELLED = "cancelled"
"""Its client left before the answer was whole."""
REFUSED = "refused"
"""It never reached the queue."""
ERROR = "error"
"""It was in the queue and could not be finished."""
EXPIRED = "expired"
"""Its deadline passed, in the queue or later."""

FAILURES = {
    "overloaded": ("overloaded", REFUSED),
    "validation": ("validation", REFUSED),
    "template_error": ("template", REFUSED),
    "tool_error": ("tool", REFUSED),
    "batch size exceeded": ("validation", REFUSED),
    "suffix not supported": ("validation", REFUSED),
    "healthcheck": ("generation", REFUSED),
    "timeout": ("timeout", EXPIRED),
    "generation": ("generation", ERROR),
    "incomplete_generation": ("incomplete", ERROR),
    "dropped": ("dropped", CANCELLED),
}
"""Why a generation failed → TGI's `err`, our reason.

What is on the left are the words of errors.py that a generation can end with, and `dropped`, for a client that left. Of
TGI's words `tool` and `timeout` are ours."""
_BUG = FAILURES["incomplete_generation"]


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


class RequestMetrics:
    """tgi_request_* and their kin. Touched once or twice a generation, never once a token."""

    def __init__(self, max_input_tokens: int, max_total_tokens: int) -> None:
        inputs, totals = token_buckets(max_input_tokens), token_buckets(max_total_tokens)
        self._count = Counter("tgi_request_count", "Generations asked for")
        self._success = Counter("tgi_request_success", "Generations that ended as they should")
        self._failure = Counter(
            "tgi_request_failure",
            "Generations that failed, by reason",
            "err",
            _distinct(err for err, _ in FAILURES.values()),
        )
        self.input_length = Histogram("tgi_request_input_length", "Prompt tokens", inputs)
        self.max_new_tokens = Histogram("tgi_request_max_new_tokens", "New tokens asked for", totals)
        self._generated = Histogram("tgi_request_generated_tokens", "New tokens", totals)
        self._total = _duration("tgi_request_duration", "Seconds from arrival to end")
        self._validation = _duration("tgi_request_validation_duration", "Seconds from arrival to the queue")
        self._queue = _duration("tgi_request_queue_duration", "Seconds in the queue")
        self._inference = _duration("tgi_request_inference_duration", "Seconds from leaving the queue to the end")
        self._per_token = _duration("tgi_request_mean_time_per_token_duration", "Seconds of inference a new token")
        self.first_token = Histogram(
            "text_generation_time_to_first_token_seconds",
            "Seconds from arrival to the first new token, the queue included; told as it comes",
            FIRST_TOKEN_BUCKETS,
        )
        self._started = Counter("text_generation_requests_started_total", "Generations asked for")
        self._finished = Counter(
            "text_generation_requests_finished_total",
            "Generations that ended, by reason; refused ones never reached the queue",
            "reason",
            _distinct([*(reason.value for reason in FinishReason), *(reason for _, reason in FAILURES.values())]),
        )
        self._cancelled = Counter(
            "text_generation_requests_cancelled_total", "Generations whose client left before the answer was whole"
        )

    def started(self) -> None:
        """A generation was asked for."""
        self._count.add()
        self._started.add()

    def succeeded(self, spent: Spent, reason: FinishReason) -> None:
        """It ended as it should."""
        self._success.add()
        self._finished.add(reason.value)
        self._total.observe(spent.total_s)
        self._validation.observe(spent.validation_s)
        self._queue.observe(spent.queue_s)
        self._inference.observe(spent.inference_s)
        self._per_token.observe(spent.per_token_s)
        self._generated.observe(spent.generated_tokens)

    def failed(self, error_type: str) -> None:
        """It did not. An `error_type` that FAILURES lacks counts as a bug of ours, which it is."""
        err, reason = FAILURES.get(error_type, _BUG)
        self._failure.add(err)
        self._finished.add(reason)
        if reason == CANCELLED:
            self._cancelled.add()

    def instruments(self) -> list[Instrument]:
        return [
            self._count,
            self._success,
            self._failure,
            self._total,
            self._validation,
            self._queue,
            self._inference,
            self._per_token,
            self._generated,
            self.input_length,
            self.max_new_tokens,
            self.first_token,
            self._started,
            self._finished,
            self._cancelled,
        ]


def _duration(name: str, documentation: str) -> Histogram:
    return Histogram(name, documentation, DURATION_BUCKETS)


def _distinct(words: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(words))
