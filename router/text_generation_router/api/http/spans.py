"""The spans of HTTP requests, made at their ends: the request itself, tokenizing, queue, prefill, decode, moves.

    POST /v1/chat/completions        attributes of HTTP and of OpenTelemetry's conventions for generative AI
      ├── tokenize
      └── of each sequence: queue ── prefill ── decode
                                       └──────────┴── move: from the loss of a replica until it runs on another one

Times are those that the log line and the metrics use. No attribute contains text of prompts or answers.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from aiohttp import hdrs, web

from text_generation_proto.addresses import plain_ip, split_host_port
from text_generation_proto.values import SAMPLING_PARAMETERS, FinishReason, Sampling, TraceContext
from text_generation_router.api.http.record import GenerationRecord, Record, route_of
from text_generation_router.error_attributes import Outcome
from text_generation_router.generation import GenerationTimes
from text_generation_router.web.bodies import MODEL

if TYPE_CHECKING:
    from text_generation_common.tracer import AttributeValue, OpenSpan, Tracer

MAX_SEQUENCES = 32
"""Sequences of a request that have spans of their own."""
MAX_MOVES = 16
"""Moves of a sequence that have spans."""
MAX_USER_AGENT_LENGTH = 256

_FINISH = {FinishReason.LENGTH: "length", FinishReason.EOS_TOKEN: "stop", FinishReason.STOP_SEQUENCE: "stop"}
_CHAT_ROUTES = ("chat", "messages", "responses")
"""Parts of the paths of routes whose prompts are conversations."""


class RequestSpans:
    """Makes the spans of HTTP requests that are posted; probes and scrapes have none."""

    def __init__(self, tracer: Tracer, model: str) -> None:
        self._tracer = tracer
        self._model = model

    def begin(self, record: Record, request: web.Request, context: TraceContext | None) -> None:
        """Decide if a request is traced here; `context` is its client's trace."""
        if request.method != hdrs.METH_POST:
            return
        record.span = self._tracer.begin(f"POST {route_of(request)}".rstrip(), record.started, context)
        record.trace = None
        if record.span is not None:
            record.trace, record.trace_id = record.span.carried, record.span.carried.trace_id

    def end(self, record: Record, span: OpenSpan, request: web.Request, status: int) -> None:
        now = time.monotonic()
        route = route_of(request)
        attributes = _of_http(request, route, status)
        if record.http_request_id is not None:
            attributes["text_generation.request_id"] = record.http_request_id
        error = record.error or next((each.error for each in record.generations if each.error), None)
        if error is not None:
            attributes["error.type"] = error.error_type
        if record.generations:
            attributes |= self._of_generations(record, route, request.get(MODEL))
        sequences = [times for generation in record.generations for times in generation.sequences]
        tokenized = {generation.request.tokenized for generation in record.generations if generation.request}
        for began, ended in tokenized:
            self._tracer.child(span, "tokenize", began, ended, {})
        for times in sequences[:MAX_SEQUENCES]:
            self._sequence(span, times, now)
        failed = status >= 500 or (error is not None and error.outcome is Outcome.ERROR)
        self._tracer.end(span, now, attributes, failed=failed)

    def _of_generations(self, record: Record, route: str, asked: str | None) -> dict[str, AttributeValue]:
        generations = record.generations
        requests = [generation.request for generation in generations if generation.request is not None]
        model = next((request.adapter for request in requests if request.adapter), self._model)
        found: dict[str, AttributeValue] = {
            "gen_ai.operation.name": "chat" if any(part in route for part in _CHAT_ROUTES) else "text_completion",
            "gen_ai.provider.name": "text-generation-inference",
            "gen_ai.request.model": asked or model,
        }
        if len(generations) > 1:
            found["gen_ai.request.choice.count"] = len(generations)
        if not requests:
            return found
        first = requests[0]
        found["gen_ai.request.max_tokens"] = first.max_new_tokens
        if first.stop_sequences:
            found["gen_ai.request.stop_sequences"] = first.stop_sequences
        if not first.sampling.greedy:
            found |= _sampling(first.sampling)
        found["gen_ai.usage.input_tokens"] = sum(len(request.prompt) for request in requests)
        found["gen_ai.usage.output_tokens"] = sum(map(_generated, generations))
        found["gen_ai.usage.cache_read.input_tokens"] = sum(generation.cached_tokens for generation in generations)
        if reasons := [_FINISH[generation.ending.reason] for generation in generations if generation.ending]:
            found["gen_ai.response.finish_reasons"] = tuple(reasons)
            found["gen_ai.response.model"] = model
        if first_tokens := [generation.first_token for generation in generations if generation.first_token]:
            found["gen_ai.server.time_to_first_token"] = min(first_tokens) - record.started
        times = generations[0].times
        if times.ended and times.generated_tokens > 1:
            found["gen_ai.server.time_per_output_token"] = (times.ended - times.first_token) / (
                times.generated_tokens - 1
            )
        return found

    def _sequence(self, parent: OpenSpan, times: GenerationTimes, now: float) -> None:
        """Record the spans of a sequence. The one in which it ended early ends then."""
        child, end = self._tracer.child, times.ended or now
        child(parent, "queue", times.queued, times.scheduled or end, {})
        if not times.scheduled:
            return
        replica = {"text_generation.replica": times.placements[0][1]} if times.placements else {}
        cached = {"text_generation.cached_tokens": times.cached_tokens}
        child(parent, "prefill", times.scheduled, times.first_token or end, replica | cached)
        if times.first_token:
            child(parent, "decode", times.first_token, end, {"gen_ai.usage.output_tokens": times.generated_tokens})
        for lost in times.losses[:MAX_MOVES]:
            before = [number for at, number in times.placements if at <= lost]
            after = [(at, number) for at, number in times.placements if at > lost]
            resumed, to = after[0] if after else (end, None)
            attributes = {"text_generation.replica.lost": before[-1]} if before else {}
            child(
                parent,
                "move",
                lost,
                resumed,
                attributes if to is None else attributes | {"text_generation.replica": to},
            )


def _sampling(sampling: Sampling) -> dict[str, AttributeValue]:
    """The numbers that are not neutral. The prefix distinguishes OpenAI's penalties from TGI's in `Sampling` only."""
    return {
        # A float32 has seven digits.
        f"gen_ai.request.{each.field.removeprefix('output_')}": float(f"{value:.7g}") if type(value) is float else value
        for each in SAMPLING_PARAMETERS
        if isinstance(value := getattr(sampling, each.field), int | float) and value != each.neutral and value < 1 << 63
    }


def _generated(generation: GenerationRecord) -> int:
    if generation.ending is not None:
        return generation.ending.generated_tokens
    return sum(times.generated_tokens for times in generation.sequences)


def _of_http(request: web.Request, route: str, status: int) -> dict[str, AttributeValue]:
    found: dict[str, AttributeValue] = {
        "http.request.method": request.method,
        "http.response.status_code": status,
        "url.path": _utf8(request.path),
        "url.scheme": request.scheme,
    }
    try:
        host, found["server.port"] = split_host_port(request.host)
    except ValueError:  # without a port
        host = request.host.strip("[]")
    found["server.address"] = _utf8(host)
    if route:
        found["http.route"] = route
    if request.remote:
        found["client.address"] = plain_ip(request.remote)
    if agent := request.headers.get(hdrs.USER_AGENT):
        found["user_agent.original"] = _utf8(agent[:MAX_USER_AGENT_LENGTH])
    return found


def _utf8(text: str) -> str:
    """Return a client's text with ? for its bytes that are not UTF-8, which OTLP cannot carry."""
    return text.encode(errors="replace").decode()
