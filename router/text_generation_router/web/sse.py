"""Server-sent events, written directly to the connection: one write per token, without waking a task.

The producer of tokens calls `send`, `close` and `fail`. The handler of the request awaits `run`, which wakes only for the
first event, the end, a connection that accepts more again, and silence.

    first event or error ──► headers ──► events … ──► end
       an error here is raised, so the response has its HTTP status
                                └─ an error here becomes the last event

`run` returns at the end of the generation, and with it the handler, which gives its permits back. The rest that a
slow client has not read by then is written afterwards, when the response ends.

Only this module depends on how aiohttp writes: after a chunked response is prepared, this module frames its body, and
aiohttp's `write_eof` ends it.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Final

from aiohttp import HttpVersion11, web

from text_generation_router.errors import ServingError
from text_generation_router.metrics.connections import CloseReason
from text_generation_router.web.connections import connection_of

ErrorEvent = Callable[[ServingError], bytes]
"""Writes an error as the last events of a stream."""
KEEP_ALIVE_EVENT = b":\n\n"
"""A comment: clients ignore it, proxies see traffic."""
MAX_WRITE = 1 << 16
"""Bytes written at a time to a connection that was congested: the rest stays here, where it is counted."""

_HEADERS = {
    "content-type": "text/event-stream",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # nginx would otherwise buffer events
}


class EventStream:
    __slots__ = (
        *("_attention", "_chunked", "_connection", "_ended", "_error", "_error_event", "_flowing", "held"),
        *("_keep_alive_s", "_last_write", "_loop", "_max_unread", "_request", "_response", "_transport", "_uncounted"),
    )

    def __init__(
        self,
        request: web.Request,
        headers: Mapping[str, str],
        keep_alive_s: float,
        max_unread: int,
        error_event: ErrorEvent,
    ) -> None:
        self._request = request
        self._response = _EventResponse(self, {**_HEADERS, **headers})
        self._chunked = request.version >= HttpVersion11
        if self._chunked:
            self._response.enable_chunked_encoding()
        else:
            self._response.force_close()  # HTTP/1.0: the body ends with the connection
        self._transport = request.transport
        self._connection = connection_of(request)
        self._loop = asyncio.get_running_loop()
        self._keep_alive_s = keep_alive_s
        self._max_unread = max_unread
        self._last_write = self._loop.time()
        self._flowing = False
        """True while events go to the connection at once; otherwise they are held for `run`."""
        self.held: Final = bytearray()
        """Unsent events: at most `max_unread` bytes, one event, and those that do not count. The connection has this array, too, so
        it is changed only in place."""
        self._connection.hold(self.held, self._on_change)
        self._uncounted = 0
        self._attention = asyncio.Event()
        self._ended = False
        self._error: ServingError | None = None
        self._error_event = error_event

    def send(self, event: bytes, *, counts: bool = True) -> None:
        """Write one event with its blank line, or hold it until the connection accepts it.

        Dropped after `close` or `fail`: several generations share a stream, and one may fail before the others notice.
        A client that is `max_unread` bytes behind is disconnected, which cancels its request. An event that `counts`
        not, such as an echo of its prompt, is there at once, and other limits bound it.
        """
        if self._flowing:
            self._write(event)
            return
        if self._ended:
            return
        # Not by this event: one may be larger than the limit, for a client that reads everything.
        behind = len(self.held) - self._uncounted > self._max_unread
        self.held.extend(event)
        self._uncounted += 0 if counts else len(event)
        if behind:
            self._ended = True
            self.held.clear()
            self._connection.hang_up(CloseReason.UNREAD)
        elif not self._connection.congested:
            self._attention.set()

    def close(self) -> None:
        """End the stream; the last event was sent."""
        self._ended = True
        self._flowing = False
        self._attention.set()

    def fail(self, error: ServingError) -> None:
        """End the stream with an event for `error`; `run` raises it if no event was sent before."""
        self._error = error
        self.close()

    async def run(self) -> web.StreamResponse:
        """Return when the stream is closed. Raises an error that came before the first event."""
        while not (self._ended and self._response.prepared):
            # A client that does not read needs no comment.
            if not await self._attention_within(None if self.held else self._last_write + self._keep_alive_s):
                if self.held or self._last_write + self._keep_alive_s > self._loop.time():
                    continue  # there were events in the meantime
                self.held.extend(KEEP_ALIVE_EVENT)
            elif self._error is not None and not self._response.prepared and not self.held:
                raise self._error
            if not self._response.prepared:
                await self._connection.turn_to_answer()
                await self._response.prepare(self._request)
            self._write_held()
        if self._error is not None:
            self.held.extend(self._error_event(self._error))
        return self._response

    async def write_rest(self) -> None:
        """Write what is held when the stream has ended, as fast as the client reads it."""
        while self.held:
            self._write_held()
            await self._request.writer.drain()

    def _on_change(self) -> None:
        """Hold events while the connection is congested, then write them."""
        if self._connection.congested:
            self._flowing = False
        else:
            self._attention.set()

    async def _attention_within(self, deadline: float | None) -> bool:
        try:
            async with asyncio.timeout_at(deadline):
                await self._attention.wait()
        except TimeoutError:
            return False
        self._attention.clear()
        return True

    def _write_held(self) -> None:
        """Write held events until the connection is congested."""
        connection = self._connection
        while self.held and not connection.congested:
            self._write(bytes(self.held[:MAX_WRITE]))
            del self.held[:MAX_WRITE]
        self._flowing = not (self.held or self._ended or connection.congested)

    def _write(self, events: bytes) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            return  # the client left; the handler is being cancelled
        transport.write(b"%x\r\n%b\r\n" % (len(events), events) if self._chunked else events)
        self._last_write = self._loop.time()


class _EventResponse(web.StreamResponse):
    """The response of a stream, which writes the rest of its events when it ends."""

    def __init__(self, events: EventStream, headers: Mapping[str, str]) -> None:
        super().__init__(headers=headers)
        self._events = events

    async def write_eof(self, data: bytes = b"") -> None:
        await self._events.write_rest()
        await super().write_eof(data)
