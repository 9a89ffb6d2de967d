"""HTTP connections: a protocol below aiohttp's that counts bytes and time, and the set of open ones with its limits.

    new ──────► headers ──────► busy ──────► idle ──► headers ──► …
     headers_s   headers_s                    keep_alive_s (aiohttp's own timer)

`headers_s` counts from the connection or from the first byte of a later request, not from the last byte: a client that
sends a header every few seconds is closed as well. A body has its own deadline (body_reader.py).

Bytes that a client has not read count against it: those that wait in the connection and, for a stream, those held for it
(sse.py). While a connection is congested (64 kB wait), or waits to be closed, its client must take `READ_RATE` bytes a second.
It may be late by `stall_s`. A client that is slower but owes less than that keeps its connection.

Beyond `limit` connections, or when descriptors run out, the connection that has waited longest for a request makes room. If
all are busy, a new connection is taken into a reserve, where only probes are answered.
"""

import asyncio
import logging
import math
import resource
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http import HTTPStatus
from typing import cast

from aiohttp import web
from aiohttp.typedefs import Handler

from text_generation_common.log import log
from text_generation_proto.addresses import plain_ip
from text_generation_router.metrics.connections import CloseReason, ConnectionMetrics
from text_generation_router.web.refusals import RefusalLimiter
from text_generation_router.web.turns import Turns

READ_RATE = 1000
"""Bytes a second that a client must take while its connection is congested."""
LINGER_S = 2.0
"""Seconds for the rest of a body that is not wanted: a client that is still sending would not see its answer."""
RESERVE = 32
"""Connections beyond the limit, for probes; and descriptors beyond those, for everything else."""
REPLACEABLE_S = 1.0
"""Seconds without a request after which a connection may be closed to make room."""
WATCH_INTERVAL_S = 0.5
"""Seconds between two checks of all deadlines."""
MAX_UNREAD_TOTAL = 256_000_000
"""Bytes that all clients together may leave unread. Beyond it, the connection that owes most is closed. Each HTTP worker has
an equal part."""
BARE_ANSWER = b"HTTP/1.1 %d %b\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
"""The answer to headers that do not end in time, or are not HTTP: neither their bytes nor the name of a library."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    limit: int = 4096
    """Most open connections, without the reserve."""
    headers_s: float = 10.0
    """Seconds for the headers of a request."""
    keep_alive_s: float = 75.0
    """Seconds that an idle connection is kept."""
    stall_s: float = 20.0
    """Seconds by which a client may be late in reading what it owes."""
    unread_total: int = MAX_UNREAD_TOTAL
    """Bytes that all clients together may leave unread."""


class Connection(asyncio.Protocol):
    """One HTTP connection: it passes everything on to aiohttp's protocol."""

    transport: asyncio.Transport

    def __init__(self, server: web.Server, connections: "Connections", *, probes_only: bool) -> None:
        """`probes_only`: the connection is beyond the limit."""
        self._loop = asyncio.get_running_loop()
        self._http = _Http(
            server,
            loop=self._loop,
            keepalive_timeout=connections.limits.keep_alive_s,
            lingering_time=LINGER_S,
            auto_decompress=False,
            access_log=None,  # type: ignore[arg-type]  # aiohttp's own default server passes None
            logger=_SILENT,
        )
        self._http.connection = self
        self._connections = connections
        self.turn_to_begin = connections.requests.take
        self.turn_to_answer = connections.responses.take
        self.management = connections.management
        """True on the management port."""
        self.probes_only = probes_only
        self.busy = False
        """True while a request has no whole response yet."""
        self.idle = False
        """True if it may be closed: it waits for another request."""
        self.congested = False
        """True while the connection accepts no more."""
        self.since = self._loop.time()
        """Time since when it waits for a request."""
        self._headers_by = self.since + connections.limits.headers_s
        self._heard = False
        """True once a byte of the next request has arrived."""
        self._held: bytes | bytearray = b""
        self._on_change: Callable[[], None] = _nothing
        self._unsent = 0
        self._checked = self.since
        self._credit_s = connections.limits.stall_s

    @property
    def unread(self) -> int:
        """Bytes that the client has not read."""
        return self.transport.get_write_buffer_size() + len(self._held)

    def hold(self, held: bytearray, on_change: Callable[[], None]) -> None:
        """Count the bytes of `held`, and call `on_change` when the connection is congested or accepts more, until the response ends."""
        self._held, self._on_change = held, on_change

    def begin(self) -> None:
        """Note that the headers of a request are complete."""
        self.busy, self.idle = True, False
        self._headers_by = math.inf
        self._connections.not_waiting(self)

    def end(self) -> None:
        """Note that a response is complete, or its client gone."""
        self.busy, self.idle, self._heard = False, True, False
        self._held, self._on_change = b"", _nothing
        self.since = self._loop.time()
        self._connections.waiting(self)

    def refuse(self, status: HTTPStatus, error: str) -> None:
        """Answer a request without readable headers, and close; `error` is the reason, for the log."""
        self.transport.write(BARE_ANSWER % (status, status.phrase.encode()))
        self.transport.close()
        self._connections.refused(status, error, self.transport)

    def hang_up(self, reason: CloseReason) -> None:
        """Close the connection at once; a client that sent part of its headers gets 408."""
        self._connections.metrics.closed(reason)
        if reason is CloseReason.HEADERS and self._heard:
            self._headers_by = math.inf
            self.refuse(HTTPStatus.REQUEST_TIMEOUT, "headers arrive too slowly")
        else:
            self.transport.abort()

    def check(self, now: float) -> None:
        """Hang up if a deadline has passed."""
        if now >= self._headers_by:
            self.hang_up(CloseReason.HEADERS)
            return
        unsent, stall_s = self.transport.get_write_buffer_size(), self._connections.limits.stall_s
        if unsent and (self.congested or not self.busy or self.transport.is_closing()):
            taken = max(0, self._unsent - unsent)
            self._credit_s = min(stall_s, self._credit_s - (now - self._checked) + taken / READ_RATE)
        else:
            self._credit_s = stall_s
        self._unsent, self._checked = unsent, now
        if self._credit_s <= 0:
            self.hang_up(CloseReason.STALLED)

    # ------------------------------------------------------------------------------------------- called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._connections.opened(self)
        self._http.connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._connections.closed(self)
        self._http.connection_lost(exc)
        del self._http  # which refers to this connection

    def data_received(self, data: bytes) -> None:
        if not self.busy and not self._heard:
            self._heard = True
            self._headers_by = self._loop.time() + self._connections.limits.headers_s
        self._http.data_received(data)

    def pause_writing(self) -> None:
        self.congested = True
        self._http.pause_writing()
        self._on_change()

    def resume_writing(self) -> None:
        self.congested = False
        self._http.resume_writing()
        self._credit_s = self._connections.limits.stall_s
        self._on_change()


def _nothing() -> None:
    """Do nothing."""


class _Http(web.RequestHandler):
    """aiohttp's protocol of a connection."""

    __slots__ = ("connection",)

    connection: Connection

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = HTTPStatus.INTERNAL_SERVER_ERROR,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer malformed HTTP and close the connection; called by aiohttp. Raises ConnectionAbortedError."""
        if not self.connection.transport.is_closing() and not request.writer.output_size:
            # Not the text of the error: it has bytes of the client, which may be a key.
            self.connection.refuse(HTTPStatus(status), type(exc).__name__)
        raise ConnectionAbortedError("malformed HTTP")


def connection_of(request: web.BaseRequest) -> Connection:
    return cast(_Http, request.protocol).connection


@web.middleware
async def answer_whole(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The first middleware of each application: it tells the connection when a request begins and its response ends."""
    connection = connection_of(request)
    connection.begin()
    try:
        await connection.turn_to_begin()
        response = await handler(request)
        if not response.prepared:
            await connection.turn_to_answer()
        await response.prepare(request)
        await response.write_eof()
    finally:
        connection.end()
    return response


class Connections:
    """The open connections of a listener."""

    def __init__(
        self, server: web.Server, limits: ConnectionLimits, metrics: ConnectionMetrics, *, management: bool = False
    ) -> None:
        self._server = server
        self.limits = limits
        self.management = management
        self.metrics = metrics
        self._refusals = RefusalLimiter()
        self._open: set[Connection] = set()
        self._waiting: dict[Connection, None] = {}
        """Connections without a request, the one that has waited longest first."""
        self._reserved: dict[Connection, None] = {}
        """The same, of those beyond the limit."""
        self.requests = Turns()
        """The turns of requests that begin."""
        self.responses = Turns()
        """The turns of responses that begin."""

    def __iter__(self) -> Iterator[Connection]:
        return iter(tuple(self._open))

    def __len__(self) -> int:
        return len(self._open)

    def admit(self, descriptor: int) -> Connection | None:
        """Return the protocol of a new connection with this descriptor; None if it must be closed.

        The system gives out the lowest free descriptor, so a high one means that nearly all are in use.
        """
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        reserve = min(RESERVE, most // 8)
        full = len(self._open) >= self.limits.limit or descriptor >= most - 2 * reserve
        probes_only = full and not self._replace(self._waiting, REPLACEABLE_S)
        crowded = len(self._open) >= self.limits.limit + reserve or descriptor >= most - reserve
        if probes_only and crowded and not self._replace(self._reserved):
            self.metrics.closed(CloseReason.REFUSED)
            return None
        return Connection(self._server, self, probes_only=probes_only)

    def make_room(self) -> None:
        """Close connections that wait for a request, because no descriptor is free."""
        for _ in range(RESERVE // 2):
            if not self._replace(self._reserved):
                self._replace(self._waiting)

    async def watch(self) -> None:
        """Hang up on clients whose deadline has passed; never returns."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(WATCH_INTERVAL_S)
            for connection in self:
                connection.check(loop.time())
            owed = {connection: connection.unread for connection in self}
            total = sum(owed.values())
            while total > self.limits.unread_total:
                largest = max(owed, key=owed.__getitem__)
                total -= owed.pop(largest)
                largest.hang_up(CloseReason.UNREAD)

    # --------------------------------------------------------------------------------------------- called by a connection

    def opened(self, connection: Connection) -> None:
        self._open.add(connection)
        self.metrics.open += 1
        self.waiting(connection)

    def closed(self, connection: Connection) -> None:
        self._open.discard(connection)
        self.metrics.open -= 1
        self.not_waiting(connection)

    def waiting(self, connection: Connection) -> None:
        """Note that the connection has no request."""
        if connection in self._open:
            (self._reserved if connection.probes_only else self._waiting)[connection] = None

    def not_waiting(self, connection: Connection) -> None:
        """Note that the connection has a request, or is closed."""
        (self._reserved if connection.probes_only else self._waiting).pop(connection, None)

    def refused(self, status: HTTPStatus, error: str, transport: asyncio.Transport) -> None:
        """Count and log a request without readable headers."""
        self.metrics.answered("", status)
        if self._refusals.admits(status):
            client = plain_ip((transport.get_extra_info("peername") or ("",))[0])
            log.info("request not readable", status=status.value, client=client, error=error)

    def _replace(self, waiting: dict[Connection, None], least_s: float = 0.0) -> bool:
        """Close the connection that has waited longest, if it has waited for `least_s`."""
        oldest = next(iter(waiting), None)
        if oldest is None or asyncio.get_running_loop().time() - oldest.since < least_s:
            return False
        del waiting[oldest]
        oldest.hang_up(CloseReason.REPLACED)
        return True


_SILENT = logging.getLogger("aiohttp.server")
"""Malformed HTTP is not worth a log line; errors of handlers are logged by the middleware."""
_SILENT.disabled = True
