"""Tracing: starts the Tracer of a process, which sends spans to an OpenTelemetry collector by OTLP.

Without a collector the OpenTelemetry packages are not imported.
"""

import logging
import os
import time
from typing import TYPE_CHECKING

from text_generation_common.exit_codes import CannotServe
from text_generation_common.log import log
from text_generation_common.secrets import PASSED_ON, erase
from text_generation_common.settings import OTLP_MISSING, SharedSettings, otlp_installed

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

    from text_generation_common.tracer import Tracer

LOG_EVERY_S = 60.0
"""Time between two log lines about an exporter that fails."""

_OTLP = "OTEL_EXPORTER_OTLP"
"""First part of the names of the exporter's variables."""


def start_tracing(config: SharedSettings, default_name: str, instance: str, version: str) -> "Tracer | None":
    """Return the tracer of this process; None if no collector is set. Raises CannotServe.

    `default_name` is the name of the service if no setting gives one, `instance` the name of the process.
    """
    try:
        return _tracer(config, default_name, instance, version)
    finally:
        erase(PASSED_ON)


def _tracer(config: SharedSettings, default_name: str, instance: str, version: str) -> "Tracer | None":
    environ = os.environ
    endpoints = config.otlp_endpoint, environ.get(f"{_OTLP}_TRACES_ENDPOINT"), environ.get(f"{_OTLP}_ENDPOINT")
    exporter = environ.get("OTEL_TRACES_EXPORTER", "otlp").strip().lower()
    if not any(endpoints) or exporter == "none" or environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    if exporter not in ("otlp", ""):
        raise CannotServe(f"OTEL_TRACES_EXPORTER is {exporter!r}: traces are sent by otlp only")
    if not otlp_installed():
        raise CannotServe(OTLP_MISSING)
    logger = logging.getLogger("opentelemetry")
    logger.handlers, logger.propagate = [_SeldomHandler(logging.WARNING)], False
    try:
        from text_generation_common.tracer import Tracer

        tracer = Tracer(_exporter(config.otlp_endpoint), config.otlp_service_name, default_name, instance, version)
    except Exception as error:  # a wrong variable raises errors of many kinds
        raise CannotServe(f"traces cannot be sent by OTLP: {error}") from error
    log.info("tracing", endpoint=next(filter(None, endpoints)))
    return tracer


def _exporter(endpoint: str) -> "SpanExporter":
    """Return an exporter to `endpoint`; "" for that of the environment. Raises CannotServe."""
    if endpoint and "://" not in endpoint:
        endpoint = f"http://{endpoint}"  # as in TGI
    protocol = os.environ.get(f"{_OTLP}_TRACES_PROTOCOL") or os.environ.get(f"{_OTLP}_PROTOCOL") or "grpc"
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        return OTLPSpanExporter(endpoint or None)
    if protocol == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpSpanExporter

        return HttpSpanExporter(f"{endpoint.rstrip('/')}/v1/traces" if endpoint else None)
    raise CannotServe(f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol!r}: it may be grpc or http/protobuf")


class _SeldomHandler(logging.Handler):
    """Passes the SDK's warnings on to our log, one in LOG_EVERY_S at most."""

    def __init__(self, level: int) -> None:
        super().__init__(level)
        self._next, self._left_out = 0.0, 0

    def emit(self, record: logging.LogRecord) -> None:
        now = time.monotonic()
        if now < self._next:
            self._left_out += 1
            return
        log.warning("traces are not sent", reason=record.getMessage(), similar=self._left_out)
        self._next, self._left_out = now + LOG_EVERY_S, 0
