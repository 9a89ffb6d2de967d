"""Reading of request bodies: a minimum rate for each, and a limit on the bytes of all that are unfinished."""

from __future__ import annotations

import asyncio

from aiohttp import web

from text_generation_router.errors import BodyTimeout, BodyTooLarge

MIN_RATE = 10_000
"""Bytes a second at which a body must arrive. It may be late by `BODY_S`."""
BODY_S = 10.0
"""Seconds by which a body may be late: each second takes one away, each MIN_RATE bytes give one back."""
MOST_UNFINISHED = 64
"""Unfinished bodies of the largest size that are kept. Beyond their bytes, the one that has stood still longest ends."""


class BodyReader:
    """Reads bodies of up to `max_body` bytes."""

    def __init__(self, max_body: int, body_s: float) -> None:
        self._max_body = max_body
        self._body_s = body_s
        self._unfinished: dict[asyncio.Timeout, int] = {}
        """Bytes of each unfinished body, the one that has stood still longest first."""
        self._total = 0

    async def read(self, request: web.Request) -> bytearray:
        """Return the body. Raises BodyTooLarge, BodyTimeout, or RequestPayloadError for a broken encoding."""
        body = bytearray()
        deadline = asyncio.timeout(self._body_s)
        try:
            async with deadline:
                while chunk := await request.content.readany():
                    body += chunk
                    if len(body) > self._max_body:
                        raise BodyTooLarge
                    self._received(deadline, len(chunk))
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
        if self._total > MOST_UNFINISHED * self._max_body:
            stillest = next(iter(self._unfinished))
            self._total -= self._unfinished.pop(stillest)
            stillest.reschedule(now)


BODIES = web.AppKey("bodies", BodyReader)
"""The reader of the application's bodies."""
