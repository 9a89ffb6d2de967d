"""Any body gets a documented 4xx at once, and the next request is served as before.

HOSTILE_BODIES sets the number of bodies (default 300, `make test-all` 10,000).
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from threaded_server import Server, serve_in_thread

BODIES = int(os.environ.get("HOSTILE_BODIES", "300"))
PATIENCE_S = 0.5
TRIES = 4
"""A response counts as slow only if every try is slow."""

DOCUMENTED = {400, 413, 415, 422}
GOOD = orjson.dumps({"inputs": "Hello there", "parameters": {"max_new_tokens": 2}})


@pytest.fixture(scope="module")
def server(demo_model: Path) -> Iterator[Server]:
    with serve_in_thread(demo_model) as server:
        yield server


def refused(server: Server, route: str, body: bytes, content_type: str = "application/json") -> None:
    """Assert that the answer is a documented refusal and fast."""
    seconds = []
    for _ in range(TRIES):
        status, answer_type, reply, took = server.post(route, body, content_type)
        assert status in DOCUMENTED, (status, body[:200])
        if answer_type == "application/json":
            error = orjson.loads(reply)
            assert set(error) == {"error", "error_type"}
            assert error["error_type"] == "validation"
        else:
            assert answer_type == "text/plain; charset=utf-8"
            assert reply
        assert len(reply) < 1000
        seconds.append(took)
        if took < PATIENCE_S:
            return
    raise AssertionError(f"slow every time: {seconds}")


JSON_VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(allow_nan=False), st.text(max_size=20)),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)),
    max_leaves=12,
)


def dumps(value: object) -> bytes:
    """Write as Python's json module does: integers of any size, Infinity, surrogates."""

    return json.dumps(value).encode("utf-8", "surrogatepass")


@st.composite
def no_object(draw: st.DrawFn) -> bytes:
    """JSON of another type, or with `inputs` wrong or missing."""
    value = draw(JSON_VALUES)
    if isinstance(value, dict):
        value.pop("inputs", None)
    if draw(st.booleans()):
        wrong = draw(JSON_VALUES.filter(lambda value: not isinstance(value, str)))
        value = {"inputs": wrong}
    return dumps(value)


@st.composite
def cut_or_garbled(draw: st.DrawFn) -> bytes:
    """A valid body that was cut, or in which one byte makes it invalid JSON."""
    if draw(st.booleans()):
        return GOOD[: draw(st.integers(0, len(GOOD) - 1))]
    at = draw(st.integers(0, len(GOOD) - 1))
    return GOOD[:at] + bytes([draw(st.one_of(st.integers(0, 8), st.integers(0x80, 0xFF)))]) + GOOD[at + 1 :]


@st.composite
def nested(draw: st.DrawFn) -> bytes:
    """Deeply nested brackets."""
    depth = draw(st.integers(1100, 200_000))
    opening, closing = draw(st.sampled_from([(b"[", b"]"), (b'{"a":', b"}"), (b'{"inputs":[', b"]}")]))
    return opening * depth + (b"1" + closing * depth if draw(st.booleans()) else b"")


NAN = st.sampled_from(["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "nan", "0x10", "01", "+1", ".5", "1."])
NOT_JSON_NUMBERS = NAN.map(lambda number: b'{"inputs":"a","parameters":{"temperature":%b}}' % number.encode())

HUGE = {
    "blanks": b" " * 10_000_000,
    "a text of 10 MB": b'{"inputs":"' + b"a" * 10_000_000 + b'"}',
    "prose": b'{"inputs":"' + b"a lot of words " * 130_000 + b'"}',
    "ideographs": b'{"inputs":"' + "漢字".encode() * 330_000 + b'"}',
    "stop strings": b'{"inputs":"a","parameters":{"stop":[' + b'"a",' * 400_000 + b'"a"]}}',
    "stop numbers": b'{"inputs":"a","parameters":{"stop":[' + b"1," * 900_000 + b"1]}}",
    "fields": b'{"inputs":1,' + b'"a":1,' * 300_000 + b'"b":1}',
}

WRONG_PARAMETERS = st.one_of(
    st.builds(
        lambda wrong: {"temperature": wrong}, st.one_of(st.text(max_size=5), st.booleans(), st.floats(-1e300, 0))
    ),
    st.builds(lambda wrong: {"seed": wrong}, st.one_of(st.integers(2**64, 2**70), st.integers(-(2**63), -1))),
    st.builds(lambda wrong: {"stop": wrong}, st.one_of(st.text(), st.lists(st.integers(), min_size=1))),
    st.builds(lambda wrong: {"details": wrong}, st.one_of(st.none(), st.integers(), st.text())),
).map(lambda parameters: dumps({"inputs": "a", "parameters": parameters, "model": "x"}))
"""Bodies with one wrong parameter; all of them: tests/unit/router/api/tgi."""

HOSTILE = st.one_of(WRONG_PARAMETERS, no_object(), cut_or_garbled(), nested(), NOT_JSON_NUMBERS, st.binary())
ROUTES = st.sampled_from(["/", "/generate", "/generate_stream"])


@settings(max_examples=BODIES, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(route=ROUTES, body=HOSTILE)
@example(route="/generate", body=b"")
@example(route="/generate", body=b'{"inputs":"a","parameters":{"top_k":9223372036854775808}}')
@example(route="/generate", body=b'{"inputs":"a","parameters":{"seed":18446744073709551616}}')
@example(route="/generate", body=b'{"inputs":"a","parameters":{"max_new_tokens":9223372036854775808}}')
@example(route="/generate", body=b'{"inputs":"\xff\xfe"}')
@example(route="/generate", body=b'{"inputs":"\\ud800"}')
def test_a_hostile_body_is_refused_soon(server: Server, route: str, body: bytes) -> None:
    refused(server, route, body)


@pytest.mark.parametrize("route", ["/", "/generate", "/generate_stream"])
@pytest.mark.parametrize("body", HUGE.values(), ids=HUGE.keys())
def test_a_huge_body_is_refused_soon(server: Server, route: str, body: bytes) -> None:
    refused(server, route, body)


@pytest.mark.parametrize("content_type", ["", "text/plain", "application/json5", "*/*", "json"])
def test_a_body_of_another_type_is_refused_soon(server: Server, content_type: str) -> None:
    refused(server, "/generate", GOOD, content_type)


def test_a_good_request_is_served_as_before(server: Server) -> None:
    status, _, reply, _ = server.post("/generate", GOOD)
    assert (status, reply) == (200, b'{"generated_text":"Hello there"}')
    empty = asyncio.run_coroutine_threadsafe(server.stack.assert_empty(), server.loop)
    empty.result(timeout=30)
