"""An HTTP/1.1 client that stamps bytes when they arrive and parses them afterwards.

`data_received` only records the time and the bytes. The event loop calls it for all sockets that are ready before it runs
`_parse_arrived`, so the parsing of one stream does not delay the stamps of the others.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import cast
from urllib.parse import urlsplit

MAX_HEAD_BYTES = 64 << 10
MAX_ERROR_BYTES = 64 << 10

BodySink = Callable[[float, bytes], None]
"""Takes a part of a body with the time of its arrival."""


class HttpFailure(Exception):
    """A request failed; the message says how."""


class Response:
    """The response to one request: the parser of its bytes, up to the end of its body."""

    __slots__ = ("_data", "_is_chunked", "_left", "_sink", "complete", "error_body", "is_open", "keep_alive", "status")

    def __init__(self, sink: BodySink) -> None:
        self._sink = sink
        self._data = b""
        self._is_chunked = False
        self._left = -1
        """Bytes left of the chunk or of the body; -1: a chunk's size comes next, or the body ends with the connection."""
        self.is_open = False
        """The head was read."""
        self.status = 0
        self.keep_alive = True
        self.error_body = b""
        self.complete = False

    def feed(self, stamp: float, data: bytes) -> None:
        """Parse bytes. Raises HttpFailure if they are no HTTP."""
        if self.complete:  # the rest of the trailers
            self.keep_alive = False
            return
        if self._data:
            data, self._data = self._data + data, b""
        while not self.is_open:
            end = data.find(b"\r\n\r\n")
            if end < 0:
                if len(data) > MAX_HEAD_BYTES:
                    raise HttpFailure("the head of the response is too long")
                self._data = data
                return
            self._read_head(data[:end])
            data = data[end + 4 :]
        if self._is_chunked:
            self._read_chunks(stamp, data)
            return
        if self._left >= 0:
            data = data[: self._left]
            self._left -= len(data)
            self.complete = self._left == 0
        if data:
            self._body(stamp, data)

    def close(self) -> bool:
        """Return True if the end of the connection is a regular end of the body."""
        if self.is_open and not self._is_chunked and self._left < 0:
            self.complete = True
        return self.complete

    def _read_head(self, head: bytes) -> None:
        first, *lines = head.decode("latin-1").split("\r\n")
        version, _, rest = first.partition(" ")
        if not version.startswith("HTTP/1.") or not rest[:3].isdigit():
            raise HttpFailure(f"no HTTP response: {first[:80]!r}")
        self.status = int(rest[:3])
        if self.status < 200:  # 100 Continue and the like: the response follows
            return
        headers = {
            name.strip().lower(): value.strip().lower() for name, _, value in (line.partition(":") for line in lines)
        }
        connection = headers.get("connection", "")
        self.keep_alive = "close" not in connection and (version != "HTTP/1.0" or "keep-alive" in connection)
        self._is_chunked = "chunked" in headers.get("transfer-encoding", "")
        if not self._is_chunked and "content-length" in headers:
            length = headers["content-length"]
            if not length.isdigit():
                raise HttpFailure(f"no HTTP response: Content-Length {length[:40]!r}")
            self._left = int(length)
            self.complete = self._left == 0
        self.is_open = True

    def _read_chunks(self, stamp: float, data: bytes) -> None:
        at, end = 0, len(data)
        while at < end:
            if self._left < 0:  # a chunk, or the last one
                line = data.find(b"\r\n", at)
                if line < 0:
                    break
                size = data[at:line].partition(b";")[0]
                try:
                    self._left = int(size, 16)
                except ValueError:
                    raise HttpFailure(f"no HTTP response: a chunk of size {size[:40]!r}") from None
                if self._left == 0:
                    self._left = -1
                    if end < line + 4:
                        break
                    self.complete = True
                    self.keep_alive = self.keep_alive and data[line + 2 :] == b"\r\n"  # else there are trailers
                    return
                at = line + 2
            if self._left > 0:
                part = data[at : at + self._left]
                self._left -= len(part)
                at += len(part)
                if part:
                    self._body(stamp, part)
                if self._left:
                    continue
            if end - at < 2:  # the line break after a chunk
                break
            at += 2
            self._left = -1
        self._data = data[at:]

    def _body(self, stamp: float, part: bytes) -> None:
        if self.status == 200:
            self._sink(stamp, part)
        elif len(self.error_body) < MAX_ERROR_BYTES:
            self.error_body += part


class _Connection(asyncio.Protocol):
    """One connection; it carries one request at a time."""

    def __init__(self, client: HttpClient) -> None:
        self._client = client
        self._transport: asyncio.Transport | None = None
        self.arrived: list[tuple[float, bytes]] = []
        self.response: Response | None = None
        self.done: asyncio.Future[None] | None = None
        self.is_closed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.arrived.append((perf_counter(), data))
        self._client.parse_soon(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_closed = True
        self._client.parse_soon(self)

    def send(self, request: bytes, response: Response) -> asyncio.Future[None]:
        """Send a request; the future is done at the end of its response."""
        assert self._transport is not None
        self.response = response
        self.done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return self.done

    def parse(self) -> None:
        """Parse the bytes that arrived."""
        arrived, self.arrived = self.arrived, []
        response, done = self.response, self.done
        if response is None or done is None or done.done():
            if arrived:  # nothing was asked for
                self.close()
            return
        try:
            for stamp, data in arrived:
                response.feed(stamp, data)
            if self.is_closed and not response.complete and not response.close():
                raise HttpFailure("the server closed the connection before the end of the response")
        except HttpFailure as failure:
            done.set_exception(failure)
            return
        if response.complete:
            done.set_result(None)

    def close(self) -> None:
        """Close the connection at once."""
        self.is_closed = True
        if self._transport is not None:
            self._transport.abort()


class HttpClient:
    """Sends POST requests to one server over connections that are kept."""

    def __init__(self, url: str, headers: Mapping[str, str], tls: ssl.SSLContext | None, timeout: float) -> None:
        parts = urlsplit(url)
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = tls if parts.scheme == "https" else None
        self._timeout = timeout
        self._prefix = parts.path.rstrip("/")
        fixed = {
            "Host": parts.netloc.rpartition("@")[2],
            "Content-Type": "application/json",
            "User-Agent": "text-generation-benchmark",
        }
        self._head = "".join(f"{name}: {value}\r\n" for name, value in (fixed | dict(headers)).items())
        self._idle: list[_Connection] = []
        self._waiting: list[_Connection] = []

    async def post(self, path: str, body: bytes, sink: BodySink) -> Response:
        """Send a request and return its response after the end of the body. Raises HttpFailure."""
        head = f"POST {self._prefix}{path} HTTP/1.1\r\n{self._head}Content-Length: {len(body)}\r\n\r\n".encode()
        connection: _Connection | None = None
        try:
            async with asyncio.timeout(self._timeout):
                while True:
                    connection, is_fresh = await self._connect()
                    response = Response(sink)
                    try:
                        await connection.send(head + body, response)
                        break
                    except HttpFailure:
                        # A server may close a kept connection at any time; the request was not seen then.
                        if is_fresh or response.status:
                            raise
        except TimeoutError:
            raise HttpFailure(f"no end after {self._timeout:g} s") from None
        except OSError as error:
            raise HttpFailure(_reason(error)) from None
        finally:
            if connection is not None and (
                connection.is_closed or not connection.response or not connection.response.complete
            ):
                connection.close()
        if connection.is_closed or not response.keep_alive:
            connection.close()
        else:
            connection.response = connection.done = None
            self._idle.append(connection)
        return response

    def close(self) -> None:
        """Close all idle connections."""
        while self._idle:
            self._idle.pop().close()

    def parse_soon(self, connection: _Connection) -> None:
        """Parse what a connection received after all sockets that are ready now were read."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._parse_arrived)
        self._waiting.append(connection)

    def _parse_arrived(self) -> None:
        waiting, self._waiting = self._waiting, []
        for connection in waiting:
            connection.parse()

    async def _connect(self) -> tuple[_Connection, bool]:
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_closed:
                return connection, False
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(lambda: _Connection(self), self._host, self._port, ssl=self._tls)
        return connection, True


def _reason(error: OSError) -> str:
    """Return the text of an error without addresses and numbers, which would differ between requests."""
    if isinstance(error, ssl.SSLError):
        return f"TLS: {getattr(error, 'verify_message', '') or error.reason or 'failed'}"
    return (error.strerror or str(error) or type(error).__name__).rpartition("] ")[2]
