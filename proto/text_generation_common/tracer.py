"""Tracer: makes spans of finished work with OpenTelemetry's SDK. Imported only where something is traced.

A span is made when its work is over, from times that are kept anyway, and queued for the SDK's exporter, which has a thread
of its own. The queue is bounded: while the collector is away, spans are dropped. The SDK reads the OTEL_* variables: sampler,
resource, headers, certificates, timeouts, sizes of queue and batches.
"""

import asyncio
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from text_generation_proto.values import TraceContext

FLUSH_S = 2.0
"""Longest time for which a stopping process sends the spans that are left."""

AttributeValue = str | bool | int | float | tuple[str, ...]
Attributes = Mapping[str, AttributeValue]

_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_FAILED, _UNSET = Status(StatusCode.ERROR), Status()


@dataclass(frozen=True, slots=True)
class OpenSpan:
    """A span that has not ended. Its trace is sampled."""

    name: str
    start: float
    """Seconds of the monotonic clock."""
    offset_ns: int
    """Wall clock minus monotonic clock: one for a span and its children, so that their times fit together."""
    context: SpanContext
    parent: SpanContext | None
    carried: TraceContext
    """The context for those who work for it."""


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
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._sampler, self._ids, self._resource = provider.sampler, provider.id_generator, resource
        self._scope = InstrumentationScope("text_generation", version)
        self._propagator = TraceContextTextMapPropagator()
        self._exporter = exporter
        self._queue = BatchSpanProcessor(exporter)

    def begin(self, name: str, start: float, carried: TraceContext | None) -> OpenSpan | None:
        """Return a new span of a server; None if its trace is not sampled. `carried` is the context of its caller."""
        context, parent = Context(), None
        if carried is not None:
            fields = {"traceparent": carried.traceparent, "tracestate": carried.tracestate}
            context = self._propagator.extract(fields, context)
            found = get_current_span(context).get_span_context()
            parent = found if found.is_valid else None
        trace_id = self._ids.generate_trace_id() if parent is None else parent.trace_id
        result = self._sampler.should_sample(context, trace_id, name, SpanKind.SERVER)
        if result.decision is not Decision.RECORD_AND_SAMPLE:
            return None
        own = SpanContext(trace_id, self._ids.generate_span_id(), False, _SAMPLED, result.trace_state)  # noqa: FBT003
        traceparent = f"00-{trace_id:032x}-{own.span_id:016x}-01"
        tracestate = result.trace_state.to_header() if result.trace_state else ""
        offset_ns = time.time_ns() - time.monotonic_ns()
        return OpenSpan(name, start, offset_ns, own, parent, TraceContext(traceparent, tracestate))

    def child(self, parent: OpenSpan, name: str, start: float, end: float, attributes: Attributes) -> None:
        """Record a finished part of an open span. Times are of the monotonic clock, in seconds."""
        above = parent.context
        own = SpanContext(above.trace_id, self._ids.generate_span_id(), False, _SAMPLED, above.trace_state)  # noqa: FBT003
        self._record(name, own, above, _wall_ns(parent, start, end), attributes)

    def end(self, span: OpenSpan, end: float, attributes: Attributes, *, failed: bool) -> None:
        """Record an open span as finished at a time of the monotonic clock."""
        status = _FAILED if failed else _UNSET
        times_ns = _wall_ns(span, span.start, end)
        self._record(span.name, span.context, span.parent, times_ns, attributes, SpanKind.SERVER, status)

    def _record(
        self,
        name: str,
        own: SpanContext,
        parent: SpanContext | None,
        times_ns: tuple[int, int],
        attributes: Attributes,
        kind: SpanKind = SpanKind.INTERNAL,
        status: Status = _UNSET,
    ) -> None:
        self._queue.on_end(
            ReadableSpan(
                name,
                own,
                parent,
                self._resource,
                attributes,
                kind=kind,
                status=status,
                start_time=times_ns[0],
                end_time=times_ns[1],
                instrumentation_scope=self._scope,
            )
        )

    async def close(self) -> None:
        """Send the spans that are left, for FLUSH_S at most. The event loop is not blocked."""
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        closing = threading.Thread(target=self._queue.shutdown, daemon=True)
        closing.start()
        closing.join(FLUSH_S)
        if closing.is_alive():
            self._exporter.shutdown()


def _wall_ns(span: OpenSpan, start: float, end: float) -> tuple[int, int]:
    return int(start * 1e9) + span.offset_ns, int(max(start, end) * 1e9) + span.offset_ns
