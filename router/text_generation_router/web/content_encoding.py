"""Compressed request bodies.

The HTTP library does not decode them: it would do so on the event loop, and to the end also where a body is refused early.
"""

import zlib

from aiohttp import hdrs, web

from text_generation_router.large_inputs import run_in_thread_if_large
from text_generation_router.web.body_errors import (
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


async def decoded(body: bytes | bytearray, encoding: str, limit: int) -> bytes:
    """Return an encoded body decoded. Raises BodyTooLarge beyond `limit` bytes, InvalidJson if it is broken."""
    return await run_in_thread_if_large(lambda: _inflated(body, encoding, limit), large=True)


def _inflated(body: bytes | bytearray, encoding: str, limit: int) -> bytes:
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
