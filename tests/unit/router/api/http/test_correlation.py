"""Request ids and trace ids from headers."""

from __future__ import annotations

import pytest

from text_generation_proto.values import TraceContext
from text_generation_router.api.http.middleware import MAX_TRACESTATE_LENGTH, request_id, trace_context

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"


@pytest.mark.parametrize("given", ["a", "req-1/2:3", "~" * 128])
def test_a_clients_id_is_kept(given: str) -> None:
    assert request_id({"x-request-id": given}) == given


@pytest.mark.parametrize("given", [None, "", "a b", "a\tb", "é", "~" * 129, "\x7f"])
def test_an_invalid_id_is_replaced(given: str | None) -> None:
    headers = {} if given is None else {"x-request-id": given}
    made = request_id(headers)
    assert len(made) == 32
    assert made != request_id(headers)


@pytest.mark.parametrize(
    "given", [f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-00", f"cc-{TRACE}-{PARENT}-01-what-the-future-will-be"]
)
def test_a_valid_traceparent_has_a_trace_id(given: str) -> None:
    context = trace_context({"traceparent": given, "tracestate": "a=b"})
    assert context == TraceContext(given, "a=b")
    assert context.trace_id == TRACE


@pytest.mark.parametrize(
    "given",
    [
        "", "00", f"00-{TRACE}-{PARENT}", f"ff-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-01-more",
        f"00-{TRACE.upper()}-{PARENT}-01", f"00-{TRACE[1:]}-{PARENT}-01", f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE}-{'0' * 16}-01", f"0x-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-01" + "-x" * 1000,
    ],
)  # fmt: skip
def test_an_invalid_traceparent_is_ignored(given: str) -> None:
    assert trace_context({"traceparent": given}) is None


def test_a_long_tracestate_is_dropped() -> None:
    for length, kept in ((MAX_TRACESTATE_LENGTH, True), (MAX_TRACESTATE_LENGTH + 1, False)):
        context = trace_context({"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "a" * length})
        assert context is not None
        assert bool(context.tracestate) is kept
