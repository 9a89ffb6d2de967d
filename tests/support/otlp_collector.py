"""A collector of traces: a gRPC server with OpenTelemetry's TraceService."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.proto.common.v1.common_pb2 import KeyValue


@dataclass(frozen=True)
class CollectedSpan:
    """A span as a collector gets it. Ids are hexadecimal digits, times seconds."""

    name: str
    service: str
    trace_id: str
    span_id: str
    parent: str
    state: str
    start: float
    end: float
    kind: int
    status: int
    attributes: Mapping[str, Any]


@dataclass
class Collector(TraceServiceServicer):
    """Keeps the spans that it gets; answers only while it `answers`."""

    port: int = 0
    spans: list[CollectedSpan] = field(default_factory=list)
    answers: threading.Event = field(default_factory=threading.Event)
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def endpoint(self) -> str:
        """The URL of the collector."""
        return f"http://127.0.0.1:{self.port}"

    def Export(self, request: ExportTraceServiceRequest, context: grpc.ServicerContext) -> ExportTraceServiceResponse:
        self.answers.wait()
        self.headers |= dict(context.invocation_metadata())
        self.add(request)
        return ExportTraceServiceResponse()

    def add(self, request: ExportTraceServiceRequest) -> None:
        """Keep the spans of a request."""
        for resource in request.resource_spans:
            service = dict(map(_attribute, resource.resource.attributes))["service.name"]
            for scope in resource.scope_spans:
                self.spans += [
                    CollectedSpan(
                        span.name,
                        service,
                        span.trace_id.hex(),
                        span.span_id.hex(),
                        span.parent_span_id.hex(),
                        span.trace_state,
                        span.start_time_unix_nano / 1e9,
                        span.end_time_unix_nano / 1e9,
                        span.kind,
                        span.status.code,
                        dict(map(_attribute, span.attributes)),
                    )
                    for span in scope.spans
                ]

    def of(self, trace_id: str) -> dict[str, list[CollectedSpan]]:
        """Return the spans of a trace by name, each list by time."""
        found: dict[str, list[CollectedSpan]] = {}
        for span in sorted(self.spans, key=lambda span: span.start):
            if span.trace_id == trace_id:
                found.setdefault(span.name, []).append(span)
        return found


def _attribute(pair: KeyValue) -> tuple[str, Any]:
    kind = pair.value.WhichOneof("value")
    value = getattr(pair.value, kind)
    return pair.key, [each.string_value for each in value.values] if kind == "array_value" else value


@contextmanager
def collecting() -> Iterator[Collector]:
    """Run a collector on a free port."""
    collector = Collector()
    collector.answers.set()
    server = grpc.server(ThreadPoolExecutor(4))
    add_TraceServiceServicer_to_server(collector, server)
    collector.port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield collector
    finally:
        collector.answers.set()
        server.stop(None).wait()
