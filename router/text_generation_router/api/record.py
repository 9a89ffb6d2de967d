"""What became of each HTTP request: one line in the log, and its counts. A prompt's text is in neither."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import structlog
from aiohttp import web

from text_generation_router.errors import ServingError
from text_generation_router.generation import Ending, Times
from text_generation_router.metrics import Metrics, Spent
from text_generation_router.request import Request

log = structlog.get_logger()

CLIENT_LEFT = 499
"""Status logged, after nginx, for a client that left before its answer was whole."""

_FAILURE_REASONS = {"incomplete_generation": "incomplete"}
"""TGI's metric labels, where they differ from `error_type`."""


@dataclass(slots=True)
class Record:
    """Filled in as a request goes its way, written once at its end."""

    started: float = field(default_factory=time.monotonic)
    is_generation: bool = False
    """Whether it counts in tgi_request_*."""
    request: Request | None = None
    ending: Ending | None = None
    times: Times = field(default_factory=Times)
    error_type: str | None = None

    def failed(self, error: ServingError) -> None:
        """The client was told of `error`."""
        self.error_type = error.error_type

    def spent(self, now: float) -> Spent:
        """Where a finished generation's time went."""
        times = self.times
        return Spent(
            total_s=now - self.started,
            validation_s=times.queued - self.started,
            queue_s=times.scheduled - times.queued,
            inference_s=now - times.scheduled,
            generated_tokens=0 if self.ending is None else self.ending.generated_tokens,
        )


RECORD = web.RequestKey("record", Record)


def finish(record: Record, request: web.Request, status: int, metrics: Metrics) -> None:
    """Count and log a request that is over."""
    now = time.monotonic()
    if record.is_generation:
        if record.error_type is None and record.ending is not None:
            metrics.request_succeeded(record.spent(now))
        else:
            error_type = record.error_type or "incomplete_generation"
            metrics.request_failed(_FAILURE_REASONS.get(error_type, error_type))
    write = log.info if request.method == "POST" else log.debug
    write("request finished", route=request.path, status=status, **_fields(record, now))


def _fields(record: Record, now: float) -> dict[str, object]:
    fields: dict[str, object] = {"total_s": round(now - record.started, 6)}
    if record.request is not None:
        fields |= {"request_id": record.request.id, "prompt_tokens": len(record.request.prompt)}
    if record.ending is not None:
        fields |= {"new_tokens": record.ending.generated_tokens, "finish_reason": record.ending.reason.value}
    times = record.times
    if times.scheduled:
        fields["queue_s"] = round(times.scheduled - times.queued, 6)
    if times.first_token:
        fields["first_token_s"] = round(times.first_token - record.started, 6)
    if record.error_type is not None:
        fields["error_type"] = record.error_type
    return fields
