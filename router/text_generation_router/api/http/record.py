"""The record of each HTTP request: its log line, the counts of its generations, and the response headers with their cost.

None of these contains prompt text.

Record                    one per HTTP request
  └── GenerationRecord    one per requested generation: n choices of 2 prompts are 2 · n; the sequences of `best_of`
                          are one
"""

import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aiohttp import web

from text_generation_common.log import log
from text_generation_proto.addresses import plain_ip
from text_generation_proto.values import TraceContext
from text_generation_router.api.http.caller import Caller
from text_generation_router.api.http.dialects import dialect_of, status_of
from text_generation_router.api.http.keys import ANYONE, HOLDER, read_tenant
from text_generation_router.error_attributes import Outcome
from text_generation_router.errors import IncompleteGeneration, InvalidRequest, ServingError
from text_generation_router.generation import GenerationResult, GenerationTimes
from text_generation_router.metrics import HttpMetrics, Latencies, RequestMetrics
from text_generation_router.metrics.errors import MAX_ERROR_TEXT
from text_generation_router.request import DEFAULT_TENANT, Request, TenantId
from text_generation_router.web.bodies import MODEL
from text_generation_router.web.refusals import RefusalLimiter

if TYPE_CHECKING:
    from text_generation_common.tracer import OpenSpan


@dataclass(slots=True, kw_only=True)
class _MayFail:
    error: type[ServingError] | None = None
    error_text: str = ""
    """The text of the error, cut after MAX_ERROR_TEXT characters."""

    def failed(self, error: ServingError) -> None:
        """Record the error sent to the client."""
        self.error, self.error_text = type(error), str(error)[:MAX_ERROR_TEXT]


@dataclass(slots=True)
class GenerationRecord(_MayFail):
    """One requested generation; its error is its own, if the request continued. Times are of the monotonic clock."""

    arrived: float
    """Arrival of the HTTP request."""
    metrics: RequestMetrics
    caller: Caller = field(default_factory=Caller)
    preparation: ExitStack = field(default_factory=ExitStack)
    """Held until its first sequence is queued."""
    request: Request | None = None
    ending: GenerationResult | None = None
    times: GenerationTimes = field(default_factory=GenerationTimes)
    """Times of the sequence that was returned, or of the first one queued."""
    sequences: list[GenerationTimes] = field(default_factory=list)
    """Times of every sequence queued for it."""
    first_token: float = 0.0
    """Time of the first token of any of its sequences; 0 before."""
    trace: TraceContext | None = None
    """That of its HTTP request, if its trace is sampled."""

    @property
    def trace_id(self) -> str:
        """The id of its trace; "" if it is not sampled."""
        return "" if self.trace is None else self.trace.trace_id

    def follow(self, times: GenerationTimes) -> None:
        """Add a sequence that was queued for this generation."""
        self.preparation.close()
        if not self.times.queued:
            self.times = times
        self.sequences.append(times)
        times.on_first_token = self._on_first_token

    @property
    def cached_tokens(self) -> int:
        """Cached tokens of its prompt."""
        return cached_tokens((self,))

    def latencies(self, now: float) -> Latencies:
        times = self.times
        return Latencies(
            total_s=now - self.arrived,
            validation_s=times.queued - self.arrived,
            queue_s=times.scheduled - times.queued,
            inference_s=now - times.scheduled,
            generated_tokens=0 if self.ending is None else self.ending.generated_tokens,
            prefill_s=max(0.0, times.first_token - times.scheduled),
            decode_s=max(0.0, times.ended - times.first_token),
        )

    def _on_first_token(self, now: float) -> None:
        if not self.first_token:
            self.first_token = now
            self.metrics.first_token_seconds.observe(now - self.arrived, trace_id=self.trace_id)


@dataclass(slots=True)
class Record(_MayFail):
    """One HTTP request, logged once at its end. Its error is that of each of its generations."""

    started: float = field(default_factory=time.monotonic)
    generations: list[GenerationRecord] = field(default_factory=list)
    http_request_id: str | None = None
    """The id of the request across services: the client's or a new one."""
    trace_id: str | None = None
    """For the log: that of the client, or that of `span`."""
    trace: TraceContext | None = None
    """For those who work for the request, if its trace is sampled."""
    span: "OpenSpan | None" = None
    """The request's own span, if its trace is sampled here."""

    def start(self, metrics: HttpMetrics) -> GenerationRecord:
        """Add a requested generation. `finish` counts it once, as a success or as a failure."""
        generation = GenerationRecord(self.started, metrics.requests)
        self.generations.append(generation)
        metrics.requests.started()
        return generation


def cached_tokens(generations: Iterable[GenerationRecord]) -> int:
    """Cached prompt tokens of generations that share a prompt: the minimum over their sequences."""
    sequences = (times for generation in generations for times in generation.sequences)
    return min((times.cached_tokens for times in sequences if times.scheduled), default=0)


RECORD = web.RequestKey("record", Record)


def finish(record: Record, request: web.Request, status: int, metrics: HttpMetrics, refusals: RefusalLimiter) -> None:
    """Count a request that ended; log it, unless it is one of too many refusals.

    Requests that are not posted are logged at level debug, those that fail excepted.
    """
    now = time.monotonic()
    route = route_of(request)
    metrics.connections.answered(route, status)
    # The error of one generation ends the others of its stream.
    failed = record if record.error else next((each for each in record.generations if each.error), None)
    first_error = failed.error if failed else None
    for generation in record.generations:
        generation.caller.holder.spend_tokens(sum(times.generated_tokens for times in generation.sequences))
        error = record.error or generation.error
        if error is None and generation.ending is not None:
            metrics.requests.succeeded(generation.latencies(now), generation.ending.reason, generation.trace_id)
        else:
            metrics.requests.failed(error or first_error or IncompleteGeneration)
    tenant, error_text = _tenant(record, request), ""
    if failed and first_error:
        error_text = failed.error_text
        path_is_known = route or request.path in error_text
        shown_text = error_text if path_is_known else f"{request.path}: {error_text}"[:MAX_ERROR_TEXT]
        shown_status = status_of(dialect_of(request), first_error)
        metrics.errors.add(first_error, shown_status, shown_text, route, tenant, record.http_request_id, now)
    posted = request.method == "POST"
    if not posted and (first_error is None or first_error.outcome is Outcome.CANCELLED):
        write = log.debug
    elif refusals.admits(status):
        write = log.info
    else:
        return
    fields: dict[str, object] = {"route": request.path, "status": status, "total_s": round(now - record.started, 6)}
    if not posted:
        fields["method"] = request.method
    adapter = next((each.request.adapter for each in record.generations if each.request), "")
    named = {"client": plain_ip(request.remote or ""), "model": adapter or request.get(MODEL), "tenant": tenant}
    fields |= {name: value for name, value in named.items() if value}
    if first_error is not None:
        fields |= {"error_type": first_error.error_type, "error": error_text}
    write("request finished", **fields, **_fields(record))


def route_of(request: web.Request) -> str:
    """The path of a request as it is in the table of routes; "" without one."""
    resource = request.match_info.route.resource
    return "" if resource is None else resource.canonical


def _tenant(record: Record, request: web.Request) -> TenantId:
    """The tenant of a request, also of one that was refused."""
    if record.generations:
        return record.generations[0].caller.tenant
    try:
        return read_tenant(request.headers, request.get(HOLDER, ANYONE))
    except InvalidRequest:
        return DEFAULT_TENANT


def _fields(record: Record) -> dict[str, object]:
    """The further fields of the log line that are known."""
    fields: dict[str, object] = {}
    if record.http_request_id is not None:
        fields["http_request_id"] = record.http_request_id
    if record.trace_id is not None:
        fields["trace_id"] = record.trace_id
    generations = record.generations
    if len(generations) > 1:
        fields["generations"] = len(generations)
    if requests := [generation.request for generation in generations if generation.request is not None]:
        fields |= {"request_id": requests[0].id, "prompt_tokens": sum(len(request.prompt) for request in requests)}
    if endings := [generation.ending for generation in generations if generation.ending is not None]:
        fields |= {
            "new_tokens": sum(ending.generated_tokens for ending in endings),
            "finish_reason": ",".join(dict.fromkeys(ending.reason.value for ending in endings)),
        }
    if scheduled := [generation.times for generation in generations if generation.times.scheduled]:
        fields["queue_s"] = round(max(times.scheduled - times.queued for times in scheduled), 6)
        fields["cached_tokens"] = sum(generation.cached_tokens for generation in generations)
    if first_tokens := [generation.first_token for generation in generations if generation.first_token]:
        fields["first_token_s"] = round(min(first_tokens) - record.started, 6)
    return fields


def timing_headers(generations: Sequence[GenerationRecord]) -> dict[str, str]:
    """Return TGI's headers of finished generations, summed over several prompts, and x-cached-tokens.

    Times are in milliseconds.
    """
    now = time.monotonic()
    spent = [generation.latencies(now) for generation in generations]
    prompts = [generation.request.prompt for generation in generations if generation.request is not None]
    return {
        "x-total-time": _milliseconds(sum(times.total_s for times in spent)),
        "x-validation-time": _milliseconds(sum(times.validation_s for times in spent)),
        "x-queue-time": _milliseconds(sum(times.queue_s for times in spent)),
        "x-inference-time": _milliseconds(sum(times.inference_s for times in spent)),
        "x-time-per-token": _milliseconds(sum(times.per_token_s for times in spent)),
        "x-prompt-tokens": str(sum(len(prompt) for prompt in prompts)),
        "x-generated-tokens": str(sum(times.generated_tokens for times in spent)),
        "x-cached-tokens": str(cached_tokens_of_prompts(generations)),
    }


def compute_time_header(generation: GenerationRecord) -> dict[str, str]:
    """Return TGI's header of replies to a single prompt, in seconds."""
    return {"x-compute-time": str(generation.latencies(time.monotonic()).total_s)}


def _milliseconds(seconds: float) -> str:
    return str(int(seconds * 1000))


def cached_tokens_of_prompts(generations: Sequence[GenerationRecord]) -> int:
    """Return the cached tokens of all prompts. A prompt with several answers counts once, as in `usage`."""
    by_prompt: dict[int, list[GenerationRecord]] = {}
    for generation in generations:
        if generation.request is not None:
            by_prompt.setdefault(id(generation.request.prompt), []).append(generation)
    return sum(cached_tokens(group) for group in by_prompt.values())
