"""HTTP connections: aiohttp's protocol with deadlines, and the set of open ones with its limits.

    new ──────► headers ──────► busy ──────► idle ──► headers ──► …
     headers_s   headers_s                    keep_alive_s (aiohttp's own timer)

`headers_s` counts from the connection or from the first byte of a later request, not from the last byte: a client that
sends a header every few seconds is not let live. A body has its own deadline (body_reader.py).

A client that does not read owes bytes: those that wait in the connection and, for a stream, those held for it (sse.py).
While a connection is congested (64 kB wait), or waits to be closed, its client must take `READ_RATE` bytes a second. It may
be late by `stall_s`. A client that is slower than the rule but owes less than that keeps its connection.

Beyond `limit` connections, or when descriptors run out, the connection that has waited longest for a request makes room. If
all are busy, a new connection is taken into a reserve, where only probes are answered. The limit is that of all HTTP workers
together: a worker without a waiting connection may exceed it if another one has some, which that one then closes.
"""

from __future__ import annotations

import asyncio
import logging
import math
import resource
from collections.abc import Iterator
from functools import partial
from http import HTTPStatus
from itertools import takewhile
from typing import cast

from aiohttp import web

from text_generation_router.api.http.body_errors import BodyTimeout
from text_generation_router.api.http.connection_limits import ConnectionLimits
from text_generation_router.api.http.refusals import UnreadableRequests
from text_generation_router.api.http.slices import Slices
from text_generation_router.api.http.unread import Unread
from text_generation_router.metrics.connections import CloseReason, ConnectionMetrics
from text_generation_router.shared_counts import SharedCount, SharedCounts

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
CHECKED_AT_ONCE = 32
"""Connections checked before other work runs."""


class Connection(web.RequestHandler):
    """One HTTP connection."""

    __slots__ = (
        "_answered",
        "_checked",
        "_connections",
        "_credit_s",
        "_delayed",
        "_headers_by",
        "_heard",
        "_kept",
        "_stream",
        "_unsent",
        "_wire",
        "probes_only",
        "since",
    )

    def __init__(self, server: web.Server, connections: Connections, *, probes_only: bool) -> None:
        """`probes_only`: the connection is beyond the limit."""
        loop = asyncio.get_running_loop()
        super().__init__(
            server,
            loop=loop,
            keepalive_timeout=connections.limits.keep_alive_s,
            lingering_time=LINGER_S,
            auto_decompress=False,
            access_log=None,  # type: ignore[arg-type]  # aiohttp's own default server passes None
            logger=_SILENT,
        )
        self._connections = connections
        self.probes_only = probes_only
        self.since = loop.time()
        """Time since when it waits for a request."""
        self._headers_by = self.since + connections.limits.headers_s
        self._kept = False
        self._heard = False
        """True once a byte of the next request has arrived."""
        self._answered = 0
        self._delayed = 0
        """Pieces of requests that were received and wait for their turn."""
        self._stream: Unread | None = None
        self._wire: asyncio.Transport | None = None
        """The transport, also while aiohttp waits for it to close."""
        self._unsent = 0
        self._checked = self.since
        self._credit_s = connections.limits.stall_s

    @property
    def busy(self) -> bool:
        """True while a request has no response yet."""
        return (self._request_count > self._answered or self._delayed > 0) and self._wire is not None

    @property
    def idle(self) -> bool:
        """True if it may be closed: it is kept for another request after at least one response."""
        return self._kept and not self.busy

    @property
    def management(self) -> bool:
        """True on the management port."""
        return self._connections.management

    @property
    def unread(self) -> int:
        """Bytes that the client owes: it has not read them."""
        waiting = 0 if self._wire is None else self._wire.get_write_buffer_size()
        return waiting + (0 if self._stream is None else self._stream.unread)

    def hold(self, stream: Unread) -> None:
        """Count the bytes that `stream` holds, and tell it when the connection accepts more, until the response ends."""
        self._stream = stream

    async def turn(self) -> None:
        """Wait for the turn of a response to begin or to end: those of a burst do so in slices."""
        await self._connections.responses.turn()

    def hang_up(self, reason: CloseReason) -> None:
        """Close the connection at once; a client that sent part of its headers gets 408."""
        self._connections.count(reason)
        if reason is CloseReason.HEADERS and self._heard and self._wire is not None:
            self._headers_by = math.inf
            self._connections.unreadable.refuse(self._wire, HTTPStatus.REQUEST_TIMEOUT, "headers arrive too slowly")
            self.force_close()
        elif self._wire is not None:
            self._wire.abort()

    def check(self, now: float) -> None:
        """Hang up if a deadline has passed."""
        wire = self._wire
        if wire is None:
            return
        if now >= self._headers_by:
            self.hang_up(CloseReason.HEADERS)
            return
        unsent = wire.get_write_buffer_size()
        stall_s = self._connections.limits.stall_s
        if unsent and (self.writing_paused or not self.busy or wire.is_closing()):
            taken = max(0, self._unsent - unsent)
            self._credit_s = min(stall_s, self._credit_s - (now - self._checked) + taken / READ_RATE)
        else:
            self._credit_s = stall_s
        self._unsent, self._checked = unsent, now
        if self._credit_s <= 0:
            self.hang_up(CloseReason.STALLED)

    # ------------------------------------------------------------------------------------------- called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._wire = cast(asyncio.Transport, transport)
        self._connections.opened(self)
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._wire = None
        self._connections.closed(self)
        slices = self._connections.slices
        if slices.begin():
            super().connection_lost(exc)
        else:
            slices.wait(partial(super().connection_lost, exc))

    def data_received(self, data: bytes) -> None:
        slices = self._connections.slices
        if not data or (self.busy and not self._delayed) or slices.begin():
            self._receive(data)
        elif self._wire is not None:
            slices.wait(partial(self._receive_delayed, data))
            self._delayed += 1
            self._connections.not_waiting(self)
            self._wire.pause_reading()

    def _receive_delayed(self, data: bytes) -> None:
        self._delayed -= 1
        if self._wire is not None:
            if not (self._delayed or self._reading_paused or self._buffer_paused):
                self._wire.resume_reading()
            self._connections.waiting(self)
            self._receive(data)

    def _receive(self, data: bytes) -> None:
        super().data_received(data)
        if self.busy:
            self._headers_by = math.inf
            self._connections.not_waiting(self)
        elif data and not self._heard:
            self._heard = True
            self._headers_by = self._loop.time() + self._connections.limits.headers_s

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._stream is not None:
            self._stream.on_congested()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._credit_s = self._connections.limits.stall_s
        if self._stream is not None:
            self._stream.on_writable()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = HTTPStatus.INTERNAL_SERVER_ERROR,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer malformed HTTP and close the connection; called by aiohttp. Raises ConnectionAbortedError."""
        if self._wire is not None and not self._wire.is_closing() and not request.writer.output_size:
            # Not the text of the error: it has bytes of the client, which may be a key.
            self._connections.unreadable.refuse(self._wire, HTTPStatus(status), type(exc).__name__)
            self._wire.close()
        raise ConnectionAbortedError("malformed HTTP")

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Write the rest of a response; called by aiohttp once for each request."""
        try:
            await self.turn()
            return await super().finish_response(request, resp, start_time)
        finally:
            self._stream = None
            self._answered += 1
            self._heard = False
            self._kept = bool(resp.keep_alive)
            if resp.status == BodyTimeout.status and not request.content.is_eof():
                self.force_close()  # the rest of the body does not come: nothing to wait for
            if not self.busy and self._wire is not None:
                self.since = self._loop.time()
                self._connections.waiting(self)


class Connections:
    """The open connections of a listener."""

    def __init__(
        self,
        server: web.Server,
        limits: ConnectionLimits,
        metrics: ConnectionMetrics,
        *,
        management: bool = False,
        shared: SharedCounts | None = None,
    ) -> None:
        """`shared`: other HTTP workers have connections, too, and the limit is that of all together."""
        self._server = server
        self.limits = limits
        self.management = management
        self._metrics = metrics
        self.unreadable = UnreadableRequests(metrics)
        self._shared = shared
        self._count, self._replaceable = (
            (SharedCount.MANAGEMENT_CONNECTIONS, SharedCount.REPLACEABLE_MANAGEMENT)
            if management
            else (SharedCount.CONNECTIONS, SharedCount.REPLACEABLE)
        )
        self._open: set[Connection] = set()
        self._waiting: dict[Connection, None] = {}
        """Connections without a request, the one that has waited longest first."""
        self._reserved: dict[Connection, None] = {}
        """The same, of those beyond the limit."""
        self.slices = Slices()
        """The turns of new requests, and of connections that end."""
        self.responses = Slices()
        """The turns of responses that begin or end."""

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
        few_descriptors = descriptor >= most - 2 * reserve
        full = few_descriptors or self._excess() >= 0
        probes_only = full and not self._replace(self._waiting, REPLACEABLE_S)
        if probes_only and not few_descriptors and self._shared is not None:  # others close connections: see `watch`
            probes_only = self._excess() >= self._shared.elsewhere(self._replaceable)
        crowded = len(self._reserved) >= reserve or descriptor >= most - reserve
        if probes_only and crowded and not self._replace(self._reserved):
            self.count(CloseReason.REFUSED)
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
            owed: dict[Connection, int] = {}
            for number, connection in enumerate(self, 1):
                connection.check(loop.time())
                if unread := connection.unread:
                    owed[connection] = unread
                if number % CHECKED_AT_ONCE == 0:
                    await asyncio.sleep(0)
            self._make_room_for_others(loop.time())
            total = sum(owed.values())
            while total > self.limits.unread_total:
                largest = max(owed, key=owed.__getitem__)
                total -= owed.pop(largest)
                largest.hang_up(CloseReason.UNREAD)

    def count(self, reason: CloseReason) -> None:
        """Count a connection that the server closes."""
        self._metrics.closed(reason)

    # --------------------------------------------------------------------------------------------- called by a connection

    def opened(self, connection: Connection) -> None:
        """Add a connection."""
        self._open.add(connection)
        self._metrics.open += 1
        self._share()
        self.waiting(connection)

    def closed(self, connection: Connection) -> None:
        """Remove a connection."""
        self._open.discard(connection)
        self._metrics.open -= 1
        self._share()
        self.not_waiting(connection)

    def waiting(self, connection: Connection) -> None:
        """Note that the connection has no request."""
        (self._reserved if connection.probes_only else self._waiting)[connection] = None

    def not_waiting(self, connection: Connection) -> None:
        """Note that the connection has a request, or is closed."""
        (self._reserved if connection.probes_only else self._waiting).pop(connection, None)

    def _share(self) -> None:
        if self._shared is not None:
            self._shared.set(self._count, len(self._open))

    def _excess(self) -> int:
        """Return the connections of all workers beyond the limit; negative below it."""
        elsewhere = 0 if self._shared is None else self._shared.elsewhere(self._count)
        return len(self._open) + elsewhere - self.limits.limit

    def _make_room_for_others(self, now: float) -> None:
        """Close connections that wait for a request if another worker took some beyond the limit, and share how many do."""
        if self._shared is None:
            return
        for _ in range(self._excess()):
            if not self._replace(self._waiting, REPLACEABLE_S):
                break
        replaceable = sum(1 for _ in takewhile(lambda each: now - each.since >= REPLACEABLE_S, self._waiting))
        self._shared.set(self._replaceable, replaceable)

    def _replace(self, waiting: dict[Connection, None], least_s: float = 0.0) -> bool:
        """Close the connection that has waited longest, if it has waited for `least_s`."""
        oldest = next(iter(waiting), None)
        if oldest is None or asyncio.get_running_loop().time() - oldest.since < least_s:
            return False
        del waiting[oldest]
        oldest.hang_up(CloseReason.REPLACED)
        return True


def connection_of(request: web.BaseRequest) -> Connection:
    """The connection of a request."""
    return cast(Connection, request.protocol)


_SILENT = logging.getLogger("aiohttp.server")
"""Malformed HTTP is not worth a log line; errors of handlers are logged by the middleware."""
_SILENT.disabled = True
