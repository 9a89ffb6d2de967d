"""Server-sent events, written straight to the connection: one write a token, and no task woken for it.

The one who makes the tokens calls `send`, `close` and `fail`; the request's handler awaits `run`, which wakes only for
the first event, for the end, for a congested connection and for silence.

    first event or failure ──► headers ──► events … ──► end
       failure here: raised, so the answer still has its HTTP status
                                 └─ failure here: a last event with the error object

This is the only place that knows how aiohttp writes: once a chunked response is prepared, its body is ours to frame, and
its own `write_eof` ends it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from aiohttp import HttpVersion11, web

from text_generation_router.api.http.dialects import ErrorEvent, tgi_error_event
from text_generation_router.errors import ServingError

KEEP_ALIVE_EVENT = b":\n\n"
"""A comment: clients skip it, proxies see traffic."""

_HEADERS = {
    "content-type": "text/event-stream",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # nginx would otherwise collect events
}


class EventStream:
    """One response made of events."""

    def __init__(
        self,
        request: web.Request,
        headers: Mapping[str, str],
        keep_alive_s: float,
        stall_s: float,
        error_event: ErrorEvent = tgi_error_event,
    ) -> None:
        self._request = request
        self._response = web.StreamResponse(headers={**_HEADERS, **headers})
        self._chunked = request.version >= HttpVersion11
        if self._chunked:
            self._response.enable_chunked_encoding()
        else:
            self._response.force_close()  # HTTP/1.0: the end of the body is the end of the connection
        self._transport = request.transport
        self._protocol = request.protocol
        self._loop = asyncio.get_running_loop()
        self._keep_alive_s = keep_alive_s
        self._stall_s = stall_s
        self._last_write = self._loop.time()
        self._flowing = False
        """Events go to the connection at once; otherwise they are held back for `run`."""
        self._held: list[bytes] = []
        """At most one request's events: bounded by its max_new_tokens."""
        self._attention = asyncio.Event()
        self._ended = False
        self._error: ServingError | None = None
        self._error_event = error_event

    def send(self, event: bytes) -> None:
        """Write one whole event, blank line included, or hold it until the connection takes it. Dropped once the stream
        was closed or failed: of several answers in one stream, one may fail while others go on."""
        if self._ended:
            return
        if self._flowing and not self._protocol.writing_paused:
            self._write(event)
        else:
            self._flowing = False
            self._held.append(event)
            self._attention.set()

    def close(self) -> None:
        """The last event was sent."""
        self._ended = True
        self._attention.set()

    def fail(self, error: ServingError) -> None:
        """No event follows but the one that tells of `error`; if none was sent before, `run` raises it."""
        self._error = error
        self.close()

    async def run(self) -> web.StreamResponse:
        """Last until the stream was closed and all of it written. Raises the failure that came before any event."""
        while not (self._ended and self._response.prepared):
            if not await self._attention_within(self._last_write + self._keep_alive_s):
                if self._last_write + self._keep_alive_s > self._loop.time():
                    continue  # events were written meanwhile
                self._held.append(KEEP_ALIVE_EVENT)
            elif self._error is not None and not self._response.prepared and not self._held:
                raise self._error
            await self._flush()
        if self._error is not None:
            self._held.append(self._error_event(self._error))
        await self._flush()
        await self._drained()
        await self._response.write_eof()
        return self._response

    async def _attention_within(self, deadline: float) -> bool:
        try:
            async with asyncio.timeout_at(deadline):
                await self._attention.wait()
        except TimeoutError:
            return False
        self._attention.clear()
        return True

    async def _flush(self) -> None:
        """Write what was held back once the connection takes it, headers first."""
        if not self._response.prepared:
            await self._response.prepare(self._request)
        await self._drained()
        if self._held:
            events, self._held = b"".join(self._held), []
            self._write(events)
        self._flowing = True

    async def _drained(self) -> None:
        """Return once the connection takes more: at once, unless it is congested. Raises ConnectionAbortedError.

        A client that reads slowly is waited for; one that reads nothing for `stall_s` must not hold its place for ever.
        """
        while True:
            unsent = self._unsent()
            try:
                async with asyncio.timeout(self._stall_s):
                    return await self._request.writer.drain()
            except TimeoutError:
                if self._unsent() >= unsent:
                    if self._transport is not None:
                        self._transport.abort()
                    raise ConnectionAbortedError("the client reads nothing") from None

    def _unsent(self) -> int:
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def _write(self, events: bytes) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            return  # the client left; its handler is being cancelled
        transport.write(b"%x\r\n%b\r\n" % (len(events), events) if self._chunked else events)
        self._last_write = self._loop.time()
