"""Reading of request bodies: a minimum rate for each, a limit on the bytes of all that are unfinished, turns for large ones.

A large body is parsed when it is its tenant's turn, which lasts until the request is queued, or its response begins:
`MAX_PREPARED` large bodies are in memory as objects.
"""

import asyncio
from collections.abc import Callable
from contextlib import ExitStack

from aiohttp import web

from text_generation_router.admission_queue import PendingWork, WorkerQueue
from text_generation_router.request import TenantId
from text_generation_router.web.body_errors import BodyTimeout, BodyTooLarge
from text_generation_router.web.content_encoding import IDENTITY, decoded

MIN_RATE = 10_000
"""Bytes a second at which a body must arrive. It may be late by `BODY_S`."""
BODY_S = 10.0
"""Seconds by which a body may be late: each second takes one away, each MIN_RATE bytes give one back."""
MAX_UNFINISHED = 128_000_000
"""Bytes of unfinished bodies that are kept. Beyond them, the least recently active upload is aborted."""

MAX_INLINE = 1 << 16
"""Bytes of a body that is parsed and validated on the event loop: a millisecond."""
MAX_PREPARED = 4
"""Larger bodies that are parsed, rendered and tokenized at a time. One place is kept for the next tenant."""
HUGE = 2_000_000
"""Bytes of a body whose objects may take more memory than those of all other prepared bodies together."""
MAX_HUGE = 2
"""Bodies above that which are prepared at a time. One place is kept for the next tenant."""

PREPARATION = web.RequestKey("preparation", ExitStack)
"""Held while a request is prepared: closed when it is queued, at the latest when its response begins."""


class BodyReader:
    """Reads bodies of up to `max_body` bytes."""

    def __init__(
        self, max_body: int, body_s: float, stage: PendingWork, tenant_of: Callable[[web.Request], TenantId]
    ) -> None:
        self._max_body = max_body
        self._body_s = body_s
        self._tenant_of = tenant_of
        self._decoding = WorkerQueue(stage, 1, only_long=True)
        self._prepared = WorkerQueue(stage, MAX_PREPARED, only_long=True)
        self._huge = WorkerQueue(stage, MAX_HUGE, only_long=True)
        self._unfinished: dict[asyncio.Timeout, int] = {}
        """Bytes of each unfinished body, the least recently active one first."""
        self._total = 0

    async def read(self, request: web.Request, encoding: str) -> bytes | bytearray:
        """Return the decoded body; if it is large, when it is the tenant's turn to be prepared.

        Raises BodyTooLarge, BodyTimeout, InvalidJson, InvalidRequest, Overloaded, CannotKeepUp, or RequestPayloadError for
        broken chunks.
        """
        body = await self._read(request)
        if encoding != IDENTITY:
            turn = await self._decoding.take(self._tenant_of(request), len(body))
            try:
                body = await decoded(body, encoding, self._max_body)
            finally:
                self._decoding.give_back(turn)
        if len(body) > MAX_INLINE:
            queue = self._huge if len(body) > HUGE else self._prepared
            turn = await queue.take(self._tenant_of(request), len(body))
            request[PREPARATION].callback(queue.give_back, turn)
        return body

    async def _read(self, request: web.Request) -> bytes | bytearray:
        content = request.content
        if content.is_eof() and content.total_bytes <= min(MAX_INLINE, self._max_body):  # it came with the headers
            return content.read_nowait()
        body = bytearray()
        deadline = asyncio.timeout(self._body_s)
        try:
            async with deadline:
                while chunk := await request.content.readany():
                    self._received(deadline, len(chunk))
                    if len(body) + len(chunk) > self._max_body:
                        raise BodyTooLarge(f"{self._max_body} bytes")
                    body += chunk
        except TimeoutError:
            raise BodyTimeout from None
        finally:
            self._total -= self._unfinished.pop(deadline, 0)
        return body

    def _received(self, deadline: asyncio.Timeout, count: int) -> None:
        now = asyncio.get_running_loop().time()
        deadline.reschedule(min((deadline.when() or now) + count / MIN_RATE, now + self._body_s))
        self._unfinished[deadline] = self._unfinished.pop(deadline, 0) + count
        self._total += count
        if self._total > max(MAX_UNFINISHED, self._max_body):
            stillest = next(iter(self._unfinished))
            self._total -= self._unfinished.pop(stillest)
            stillest.reschedule(now)


BODIES = web.AppKey("bodies", BodyReader)
