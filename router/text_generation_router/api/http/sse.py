"""Server-sent events, written directly to the connection: one write per token, without waking a task.

The producer of tokens calls `send`, `close` and `fail`. The handler of the request awaits `run`, which wakes only for the
first event, the end, a congested connection and silence.

    first event or error ──► headers ──► events … ──► end
       an error here is raised, so the response has its HTTP status
                                └─ an error here becomes the last event

Only this module depends on how aiohttp writes: after a chunked response is prepared, this module frames its body, and
aiohttp's `write_eof` ends it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from aiohttp import HttpVersion11, web

from text_generation_router.api.http.dialects import ErrorEvent, tgi_error_event
from text_generation_router.errors import ServingError

KEEP_ALIVE_EVENT = b":\n\n"
"""A comment: clients ignore it, proxies see traffic."""

_HEADERS = {
    "content-type": "text/event-stream",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # nginx would otherwise buffer events
}


class EventStream:
    """A streamed response."""

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
            self._response.force_close()  # HTTP/1.0: the body ends with the connection
        self._transport = request.transport
        self._protocol = request.protocol
        self._loop = asyncio.get_running_loop()
        self._keep_alive_s = keep_alive_s
        self._stall_s = stall_s
        self._last_write = self._loop.time()
        self._flowing = False
        """True while events go to the connection at once; otherwise they are held for `run`."""
        self._held: list[bytes] = []
        """Unsent events; bounded by max_new_tokens of the request."""
        self._attention = asyncio.Event()
        self._ended = False
        self._error: ServingError | None = None
        self._error_event = error_event

    def send(self, event: bytes) -> None:
        """Write one event with its blank line, or hold it until the connection accepts it.

        Dropped after `close` or `fail`: several generations share a stream, and one may fail before the others notice.
        """
        if self._ended:
            return
        if self._flowing and not self._protocol.writing_paused:
            self._write(event)
        else:
            self._flowing = False
            self._held.append(event)
            self._attention.set()

    def close(self) -> None:
        """End the stream; the last event was sent."""
        self._ended = True
        self._attention.set()

    def fail(self, error: ServingError) -> None:
        """End the stream with an event for `error`; `run` raises it if no event was sent before."""
        self._error = error
        self.close()

    async def run(self) -> web.StreamResponse:
        """Return when the stream is closed and written. Raises an error that came before the first event."""
        while not (self._ended and self._response.prepared):
            if not await self._attention_within(self._last_write + self._keep_alive_s):
                if self._last_write + self._keep_alive_s > self._loop.time():
                    continue  # events were written in the meantime
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
        """Write the headers, if not yet sent, then the held events."""
        if not self._response.prepared:
            await self._response.prepare(self._request)
        await self._drained()
        if self._held:
            events, self._held = b"".join(self._held), []
            self._write(events)
        self._flowing = True

    async def _drained(self) -> None:
        """Wait until the connection accepts more. Raises ConnectionAbortedError if the client reads nothing for `stall_s`.

        A slow reader is waited for; a client that stopped reading must not hold its permit for ever.
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
            return  # the client left; the handler is being cancelled
        transport.write(b"%x\r\n%b\r\n" % (len(events), events) if self._chunked else events)
        self._last_write = self._loop.time()
