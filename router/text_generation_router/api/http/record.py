"""What became of each HTTP request: one line in the log, and the counts of its generations. A prompt's text is in
neither.

    Record (one an HTTP request)
      └── GenerationRecord (one a generation asked for: n choices of 2 prompts are 2 · n; sequences tried for `best_of`
                            are one, for one is asked for)
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import structlog
from aiohttp import web

from text_generation_router.api.http.caller import Caller
from text_generation_router.errors import IncompleteGeneration, ServingError
from text_generation_router.generation import Ending, Times
from text_generation_router.metrics import Metrics, RequestMetrics, Spent
from text_generation_router.request import Request

log = structlog.get_logger()

CLIENT_LEFT = 499
"""Status logged, after nginx, for a client that left before its answer was whole."""


@dataclass(slots=True)
class GenerationRecord:
    """One generation asked for, filled in as it goes its way."""

    arrived: float
    """When its HTTP request came."""
    metrics: RequestMetrics
    caller: Caller = field(default_factory=Caller)
    """What the headers say."""
    request: Request | None = None
    ending: Ending | None = None
    times: Times = field(default_factory=Times)
    """Of the sequence that was answered, or of the first that ran."""
    sequences: list[Times] = field(default_factory=list)
    """Of every sequence that ran for it."""
    first_token: float = 0.0
    """When the first token came, of whichever sequence; 0 until it did."""
    error_type: str | None = None
    """Its own failure, where the HTTP request went on without it."""

    def follow(self, times: Times) -> None:
        """A sequence was queued for it."""
        if not self.times.queued:
            self.times = times
        self.sequences.append(times)
        times.on_first_token = self._on_first_token

    @property
    def cached_tokens(self) -> int:
        """The tokens of its prompt that were not computed for it."""
        return cached_tokens((self,))

    def failed(self, error: ServingError) -> None:
        """The client was told of `error`."""
        self.error_type = error.error_type

    def spent(self, now: float) -> Spent:
        """Where a finished generation's time went."""
        times = self.times
        return Spent(
            total_s=now - self.arrived,
            validation_s=times.queued - self.arrived,
            queue_s=times.scheduled - times.queued,
            inference_s=now - times.scheduled,
            generated_tokens=0 if self.ending is None else self.ending.generated_tokens,
        )

    def _on_first_token(self, now: float) -> None:
        if not self.first_token:
            self.first_token = now
            self.metrics.first_token.observe(now - self.arrived)


@dataclass(slots=True)
class Record:
    """One HTTP request, written down once at its end."""

    started: float = field(default_factory=time.monotonic)
    generations: list[GenerationRecord] = field(default_factory=list)
    http_request_id: str | None = None
    """What the request is called across services: the client's name for it, or ours."""
    trace_id: str | None = None
    """The trace it is part of, if it is."""
    error_type: str | None = None
    """Why the request failed as a whole, and each of its generations with it."""

    def start(self, metrics: Metrics) -> GenerationRecord:
        """A generation was asked for. It counts from here on: as a success or as a failure, once, in `finish`."""
        generation = GenerationRecord(self.started, metrics.requests)
        self.generations.append(generation)
        metrics.requests.started()
        return generation

    def failed(self, error: ServingError) -> None:
        """The client was told of `error` in place of an answer."""
        self.error_type = error.error_type


def cached_tokens(answers: Iterable[GenerationRecord]) -> int:
    """The tokens of one prompt that were not computed for its answers: as many as the answer found that found fewest."""
    sequences = (times for one in answers for times in one.sequences)
    return min((times.cached_tokens for times in sequences if times.scheduled), default=0)


RECORD = web.RequestKey("record", Record)


def finish(record: Record, request: web.Request, status: int, metrics: Metrics) -> None:
    """Count and log a request that is over."""
    now = time.monotonic()
    # The failure of one answer ends the others of its stream.
    first_failure = next((one.error_type for one in record.generations if one.error_type), None)
    for generation in record.generations:
        error_type = record.error_type or generation.error_type
        if error_type is None and generation.ending is not None:
            metrics.requests.succeeded(generation.spent(now), generation.ending.reason)
        else:
            metrics.requests.failed(error_type or first_failure or IncompleteGeneration.error_type)
    write = log.info if request.method == "POST" else log.debug
    write("request finished", route=request.path, status=status, **_fields(record, now))


def _fields(record: Record, now: float) -> dict[str, object]:
    fields: dict[str, object] = {"total_s": round(now - record.started, 6)}
    if record.http_request_id is not None:
        fields["http_request_id"] = record.http_request_id
    if record.trace_id is not None:
        fields["trace_id"] = record.trace_id
    generations = record.generations
    if len(generations) > 1:
        fields["generations"] = len(generations)
    if requests := [one.request for one in generations if one.request is not None]:
        fields |= {"request_id": requests[0].id, "prompt_tokens": sum(len(one.prompt) for one in requests)}
    if endings := [one.ending for one in generations if one.ending is not None]:
        fields |= {
            "new_tokens": sum(one.generated_tokens for one in endings),
            "finish_reason": ",".join(dict.fromkeys(one.reason.value for one in endings)),
        }
    if queued := [one.times.scheduled - one.times.queued for one in generations if one.times.scheduled]:
        fields["queue_s"] = round(max(queued), 6)
        fields["cached_tokens"] = sum(one.cached_tokens for one in generations)
    if first_tokens := [one.first_token for one in generations if one.first_token]:
        fields["first_token_s"] = round(min(first_tokens) - record.started, 6)
    error_type = record.error_type or next((one.error_type for one in generations if one.error_type), None)
    if error_type is not None:
        fields["error_type"] = error_type
    return fields
