"""Reading of request bodies: a minimum rate for each, a limit on the bytes of all that are unfinished, turns for large ones.

A large body is parsed when it is its tenant's turn, which lasts until the request is queued, or its response begins:
`MAX_PREPARED` large bodies are in memory as objects.

The HTTP library does not decode compressed bodies: it would do so on the event loop, and to the end also where a body is
refused early.
"""

import asyncio
import zlib
from collections.abc import Callable
from contextlib import ExitStack

from aiohttp import hdrs, web

from text_generation_router.admission_queue import PendingWork, WorkerQueue
from text_generation_router.large_inputs import run_in_thread_if_large
from text_generation_router.request import TenantId
from text_generation_router.web.body_errors import (
    BodyTimeout,
    BodyTooLarge,
    InvalidJson,
    UnsupportedMediaType,
    UnsupportedTransferCoding,
)

IDENTITY = "identity"
"""Not encoded."""
CHUNKED = "chunked"
"""The only transfer coding that is accepted."""
ENCODINGS = ("gzip", "deflate", IDENTITY)
"""Encodings of bodies that are accepted."""

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


Parts = list[bytes] | list[bytearray]
"""A body in parts of any size."""


def length(parts: Parts) -> int:
    """Return the bytes of a body."""
    return sum(map(len, parts))


def encoding_of(request: web.Request) -> str:
    """The encoding of the body. Raises UnsupportedMediaType or UnsupportedTransferCoding."""
    if (
        request.headers.get(hdrs.TRANSFER_ENCODING, CHUNKED).lower() != CHUNKED
    ):  # the HTTP library ignores other codings
        raise UnsupportedTransferCoding
    encoding = ", ".join(request.headers.getall(hdrs.CONTENT_ENCODING, [IDENTITY])).lower()
    if encoding not in ENCODINGS:
        raise UnsupportedMediaType(f"Expected request with `Content-Encoding` of {', '.join(ENCODINGS)}")
    return encoding


async def decoded(body: bytes, encoding: str, limit: int) -> bytes:
    """Return an encoded body decoded. Raises BodyTooLarge beyond `limit` bytes, InvalidJson if it is broken."""
    return await run_in_thread_if_large(lambda: _inflated(body, encoding, limit), large=True)


def _inflated(body: bytes, encoding: str, limit: int) -> bytes:
    if encoding == "gzip":
        window = zlib.MAX_WBITS | 16
    else:  # some clients send the data of `deflate` without its header
        window = zlib.MAX_WBITS if body[:1] and body[0] & 0xF == zlib.DEFLATED else -zlib.MAX_WBITS
    decoder = zlib.decompressobj(window)
    try:
        text = decoder.decompress(body, limit + 1)
    except zlib.error:
        text = b""
    if len(text) > limit:
        raise BodyTooLarge(f"{limit} bytes")
    if not decoder.eof or decoder.unused_data:
        raise InvalidJson(f"Failed to buffer the request body: it is not of `Content-Encoding: {encoding}`")
    return text


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

    async def read(self, request: web.Request, encoding: str) -> Parts:
        """Return the parts of the decoded body; if it is large, when it is the tenant's turn to be prepared.

        Raises BodyTooLarge, BodyTimeout, InvalidJson, InvalidRequest, Overloaded, CannotKeepUp, or RequestPayloadError for
        broken chunks.
        """
        parts = await self._read(request)
        if encoding != IDENTITY:
            turn = await self._decoding.take(self._tenant_of(request), length(parts))
            try:
                parts = [await decoded(b"".join(parts), encoding, self._max_body)]
            finally:
                self._decoding.give_back(turn)
        if (size := length(parts)) > MAX_INLINE:
            queue = self._huge if size > HUGE else self._prepared
            turn = await queue.take(self._tenant_of(request), size)
            request[PREPARATION].callback(queue.give_back, turn)
        return parts

    async def _read(self, request: web.Request) -> Parts:
        """Return the parts of the body, as long as they came or longer: one buffer for all would be copied while it grows."""
        content = request.content
        if content.is_eof() and content.total_bytes <= min(MAX_INLINE, self._max_body):  # it came with the headers
            return [content.read_nowait()]
        parts, size = [bytearray()], 0
        deadline = asyncio.timeout(self._body_s)
        try:
            async with deadline:
                while chunk := await request.content.readany():
                    self._received(deadline, len(chunk))
                    size += len(chunk)
                    if size > self._max_body:
                        raise BodyTooLarge(f"{self._max_body} bytes")
                    if len(parts[-1]) > MAX_INLINE:
                        parts.append(bytearray())
                    parts[-1] += chunk
        except TimeoutError:
            raise BodyTimeout from None
        finally:
            self._total -= self._unfinished.pop(deadline, 0)
        return parts

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
