"""Tracer: makes spans of finished work with OpenTelemetry's SDK. Imported only where something is traced.

The parts of a span are made when their work is over, from times that are kept anyway. Ended spans are queued for the SDK's
exporter, which has a thread of its own. The queue is bounded: while the collector is away, spans are dropped. The SDK reads
the OTEL_* variables: sampler, resource, headers, certificates, timeouts, limits, sizes of queue and batches.
"""

import asyncio
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from text_generation_proto.values import TraceContext

FLUSH_S = 2.0
"""Longest time for which a stopping process sends the spans that are left."""

AttributeValue = str | bool | int | float | tuple[str, ...]
Attributes = Mapping[str, AttributeValue]


@dataclass(frozen=True, slots=True)
class OpenSpan:
    """A span that has not ended. Its trace is sampled."""

    span: Span
    offset_ns: int
    """Wall clock minus monotonic clock: one for a span and its children, so that their times fit together."""
    context: Context
    """That of its children."""
    carried: TraceContext
    """The context for those who work for it."""

    def wall_ns(self, at: float) -> int:
        """Return a time of the monotonic clock, in seconds, as one of the wall clock."""
        return int(at * 1e9) + self.offset_ns


class Tracer:
    """Begins and records the spans of one process. Any thread may call it."""

    def __init__(
        self, exporter: SpanExporter, service_name: str, default_name: str, instance: str, version: str
    ) -> None:
        """`service_name`: "" for that of the environment, else `default_name`."""
        resource = Resource.create({"service.instance.id": instance, "service.version": version})
        if not service_name and str(resource.attributes["service.name"]).startswith("unknown_service"):
            service_name = default_name
        if service_name:
            resource = resource.merge(Resource({"service.name": service_name}))
        self._exporter = exporter
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("text_generation", version)
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, name: str, start: float, carried: TraceContext | None) -> OpenSpan | None:
        """Return a new span of a server; None if its trace is not sampled. `carried` is the context of its caller."""
        context = Context()
        if carried is not None:
            fields = {"traceparent": carried.traceparent, "tracestate": carried.tracestate}
            context = self._propagator.extract(fields, context)
        offset_ns = time.time_ns() - time.monotonic_ns()
        span = self._tracer.start_span(name, context, SpanKind.SERVER, start_time=int(start * 1e9) + offset_ns)
        if not span.get_span_context().trace_flags.sampled:
            return None
        own, fields = set_span_in_context(span, Context()), {}
        self._propagator.inject(fields, own)
        return OpenSpan(span, offset_ns, own, TraceContext(fields["traceparent"], fields.get("tracestate", "")))

    def child(self, parent: OpenSpan, name: str, start: float, end: float, attributes: Attributes) -> None:
        """Record a finished part of an open span. Times are of the monotonic clock, in seconds."""
        span = self._tracer.start_span(name, parent.context, attributes=attributes, start_time=parent.wall_ns(start))
        span.end(parent.wall_ns(max(start, end)))

    def end(self, span: OpenSpan, end: float, attributes: Attributes, *, failed: bool) -> None:
        """Record an open span as finished at a time of the monotonic clock."""
        span.span.set_attributes(attributes)
        if failed:
            span.span.set_status(StatusCode.ERROR)
        span.span.end(span.wall_ns(end))

    async def close(self) -> None:
        """Send the spans that are left, for FLUSH_S at most. The event loop is not blocked."""
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(FLUSH_S)
        if closing.is_alive():
            self._exporter.shutdown()
