"""Tracing without a collector, with one that is away, slow or refuses, and with wrong settings."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Coroutine, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import grpc
import pytest
from full_grid import full
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from otlp_collector import Collector, collecting
from structlog.testing import capture_logs

from text_generation_common.exit_codes import CannotServe, ExitCode
from text_generation_common.settings import SharedSettings
from text_generation_common.tracer import FLUSH_S, Tracer
from text_generation_common.tracing import start_tracing

SPANS = 20_000


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_SERVICE_NAME"):
        monkeypatch.delenv(name, raising=False)
    # The SDK leaves out lines like its last one, which may be of another test.
    for module in ("exporter.otlp.proto.grpc.exporter", "sdk._shared_internal"):
        monkeypatch.setattr(logging.getLogger(f"opentelemetry.{module}"), "filters", [])


def tracer(**settings: str) -> Tracer:
    started = start_tracing(SharedSettings.of(**settings), "service", "one", "1")
    assert started is not None
    return started


def one_span(tracer: Tracer, name: str = "request") -> bool:
    """Record a span with a child; return True if it is sampled."""
    now = time.monotonic()
    span = tracer.begin(name, now, None)
    if span is not None:
        tracer.child(span, "part", now, now + 1, {"number": 1})
        tracer.end(span, now + 2, {"reasons": ("stop",)}, failed=False)
    return span is not None


async def turns_during(work: Coroutine[None, None, None]) -> int:
    """Return the number of turns of the event loop until `work` is done."""
    turns = 0
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(work)
        while not task.done():
            turns += 1
            await asyncio.sleep(0.001)
    return turns


@pytest.fixture(params=["slow", *map(full, ("away", "refusing"))])
def endpoint(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A collector that takes nothing."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    if request.param == "away":
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            yield f"127.0.0.1:{unused.getsockname()[1]}"
        return
    with collecting() as collector:
        if request.param == "slow":
            collector.answers.clear()
        else:
            refuse = grpc.StatusCode.RESOURCE_EXHAUSTED
            monkeypatch.setattr(Collector, "Export", lambda _self, _request, context: context.abort(refuse, "no"))
        yield f"127.0.0.1:{collector.port}"


def test_a_collector_that_takes_nothing_costs_a_bounded_queue_and_one_log_line(endpoint: str) -> None:
    with capture_logs() as logs:
        traced = tracer(otlp_endpoint=endpoint)
        began = time.monotonic()
        for _ in range(SPANS // 2):
            one_span(traced)
        assert time.monotonic() - began < 30, "recording waits for nothing"
        stopping, turns = time.monotonic(), asyncio.run(turns_during(traced.close()))
        assert time.monotonic() - stopping < FLUSH_S + 10
        assert turns > 1, "the event loop goes on"
    warnings = [line for line in logs if line["log_level"] == "warning"]
    assert [line["event"] for line in warnings] == ["traces are not sent"]


def test_sent_spans_have_the_names_and_the_share_that_the_environment_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.port}")
        monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
        monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.1")
        traced = tracer()
        sampled = sum(one_span(traced) for _ in range(1000))
        asyncio.run(traced.close())
        assert 50 < sampled < 200
        assert [span.name for span in collector.spans].count("request") == sampled
        assert {span.service for span in collector.spans} == {"service"}
        for variable, flag, name in (("theirs", "", "theirs"), ("theirs", "ours", "ours")):
            collector.spans.clear()
            monkeypatch.setenv("OTEL_SERVICE_NAME", variable)
            monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_on")
            traced = tracer(otlp_service_name=flag)
            one_span(traced)
            asyncio.run(traced.close())
            part, request = sorted(collector.spans, key=lambda span: span.name)
            assert (part.service, part.parent, part.trace_id) == (name, request.span_id, request.trace_id)
            assert request.end - request.start == pytest.approx(2)
            assert request.attributes == {"reasons": ["stop"]}


def test_spans_are_sent_by_http_too(monkeypatch: pytest.MonkeyPatch) -> None:
    collector, paths = Collector(), []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            paths.append(self.path)
            body = self.rfile.read(int(self.headers["content-length"]))
            collector.add(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        traced = tracer(otlp_endpoint=f"http://127.0.0.1:{server.server_port}")
        one_span(traced)
        asyncio.run(traced.close())
        server.shutdown()
    assert paths == ["/v1/traces"]
    assert {span.name for span in collector.spans} == {"request", "part"}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json", "may be grpc or http/protobuf"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "soon", "traces cannot be sent"),
        ("OTEL_EXPORTER_OTLP_COMPRESSION", "zip", "traces cannot be sent"),
        ("OTEL_TRACES_EXPORTER", "zipkin", "by otlp only"),
    ],
)
def test_a_wrong_variable_is_one_line_at_the_start(
    name: str, value: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(CannotServe, match=message):
        tracer(otlp_endpoint="http://127.0.0.1:1")


@pytest.mark.parametrize(("name", "value"), [("OTEL_SDK_DISABLED", "true"), ("OTEL_TRACES_EXPORTER", "none")])
def test_the_environment_turns_tracing_off(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    assert start_tracing(SharedSettings.of(otlp_endpoint="http://127.0.0.1:1"), "service", "one", "1") is None


@pytest.mark.parametrize("given", ["host:4317", "http://host:4317", "https://host", "[::1]:4317"])
def test_an_endpoint_is_a_url_or_a_host_and_a_port(given: str) -> None:
    assert SharedSettings.of(otlp_endpoint=given).otlp_endpoint == given


@pytest.mark.parametrize(
    "given",
    [
        *("not-a-url", "http://", "http://host:0", "ftp://host:1", "http://host:port", "http://host:99999", ":4317"),
        "https://user:word@host",
    ],
)
def test_a_wrong_endpoint_is_refused(given: str) -> None:
    with pytest.raises(ValueError, match="URL of a collector"):
        SharedSettings.of(otlp_endpoint=given)


def test_without_a_collector_no_package_of_opentelemetry_is_imported() -> None:
    program = (
        "import sys, text_generation_router.serve.one_process, text_generation_shard.serve\n"
        "from text_generation_common.settings import SharedSettings\n"
        "from text_generation_common.tracing import start_tracing\n"
        "assert start_tracing(SharedSettings.of(), 'service', 'one', '1') is None\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]"
    )
    subprocess.run([sys.executable, "-c", program], check=True, env={"PATH": "/usr/bin"})


WITHOUT_OPENTELEMETRY = """
import runpy, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "opentelemetry":
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Finder())
runpy.run_module(sys.argv.pop(1), run_name="__main__")
"""


def without_opentelemetry(module: str, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT_OPENTELEMETRY, module, *words]
    return subprocess.run(
        command, env={**os.environ, **environ}, capture_output=True, text=True, timeout=60, check=False
    )


def test_without_the_extra_the_flag_is_refused_in_one_line_that_names_it() -> None:
    done = without_opentelemetry("text_generation_launcher", "check", "/model", "--otlp-endpoint=http://127.0.0.1:4317")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (ExitCode.USAGE, "", 1)
    assert "--otlp-endpoint (or OTLP_ENDPOINT): traces need the extra `otlp`: pip install" in done.stderr


def test_without_the_extra_a_collector_in_the_environment_ends_the_start_in_one_line() -> None:
    collector = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4317"}
    done = without_opentelemetry("text_generation_shard", "--engine=echo", "--address=unix:///s", **collector)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (ExitCode.FAILED, "", 1)
    assert "traces need the extra `otlp`: pip install" in done.stderr
