"""Random bytes as HTTP: each connection is answered with no 5xx or closed, soon, and good requests are served."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from threaded_server import Server, serve_in_thread

PATIENCE_S = 5.0

NAMES = st.sampled_from(
    ["host", "content-length", "transfer-encoding", "content-type", "connection", "expect", "upgrade", "cookie", "x-a"]
)
VALUES = st.one_of(
    st.sampled_from(["5", "-1", "+5", "99999999999999999999", "chunked", "gzip, chunked", "close", "keep-alive", "h2c",
                     "100-continue", "application/json", "a\tb", " ", "\x7f", "\xff"]),
    st.text(st.characters(codec="latin-1"), max_size=20),
)  # fmt: skip
LINES = st.sampled_from(
    ["GET /health HTTP/1.1", "POST /generate HTTP/1.1", "POST /generate HTTP/1.0", "GET / HTTP/9.9", "PRI * HTTP/2.0",
     "OPTIONS * HTTP/1.1", "POST /generate_stream HTTP/1.1", "DELETE /v1/responses/\x00 HTTP/1.1", "get /health HTTP/1.1",
     "CONNECT a:1 HTTP/1.1", "GET http://a/health HTTP/1.1", "GET"]
)  # fmt: skip
SIZES = st.sampled_from(["5", "0", "FFFFFFFFFFFFFFFFF", "-1", "5;a=b", "0x5", "", " 5", "5 "])
CHUNKS = st.lists(st.tuples(SIZES, st.binary(max_size=8)), max_size=4).map(
    lambda chunks: b"".join(size.encode() + b"\r\n" + data + b"\r\n" for size, data in chunks)
)
BREAKS = st.sampled_from([b"\r\n", b"\n", b"\r", b"\r\n "])


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    line_break = draw(BREAKS)
    headers = draw(st.lists(st.tuples(NAMES, st.sampled_from([": ", ":", " : "]), VALUES), max_size=6))
    lines = [draw(LINES), *(name + colon + value for name, colon, value in headers)]
    head = line_break.join(line.encode("latin-1") for line in lines)
    return head + 2 * line_break + draw(st.one_of(CHUNKS, st.binary(max_size=20)))


@pytest.fixture(scope="module")
def server(demo_model: Path) -> Iterator[Server]:
    with serve_in_thread(demo_model) as server:
        yield server


@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(sent=st.one_of(requests(), st.binary(max_size=100)))
@example(sent=b"POST /generate HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n5\r\n")
def test_random_bytes_are_refused(server: Server, sent: bytes) -> None:
    answer = b""
    address = ("127.0.0.1", server.stack.port)
    with (
        socket.create_connection(address, timeout=PATIENCE_S) as connection,
        suppress(ConnectionError),  # closed by the server
    ):
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        while received := connection.recv(1 << 16):
            answer += received
    assert not re.search(rb"^HTTP/1\.[01] 5\d\d", answer, re.MULTILINE), answer


def test_a_good_request_is_served_as_before(server: Server) -> None:
    status, _, reply, _ = server.post("/generate", b'{"inputs":"Hello there","parameters":{"max_new_tokens":2}}')
    assert (status, reply) == (200, b'{"generated_text":"Hello there"}')
    asyncio.run_coroutine_threadsafe(server.stack.assert_empty(), server.loop).result(timeout=30)
