"""What a request is called across services: `x-request-id` in and out, and the trace of W3C's `traceparent`."""

from __future__ import annotations

import os
from collections.abc import Mapping

from aiohttp import hdrs, web

from text_generation_router.api.http.dialects import Dialect, dialect_of
from text_generation_router.api.http.record import RECORD

X_REQUEST_ID = "x-request-id"
ANTHROPIC_REQUEST_ID = "request-id"
"""What Anthropic's clients read."""
TRACEPARENT = "traceparent"
LONGEST_ID = 128
_HEX = frozenset("0123456789abcdef")


def request_id(headers: Mapping[str, str]) -> str:
    """The client's name for its request, or a new one where it has none that is fit for a header and a log line."""
    given = headers.get(X_REQUEST_ID)
    if given and len(given) <= LONGEST_ID and given.isascii() and given.isprintable() and " " not in given:
        return given
    return os.urandom(16).hex()


def trace_id(headers: Mapping[str, str]) -> str | None:
    """The trace the request is part of; None for no or no valid `traceparent` (W3C Trace Context, level 1)."""
    given = headers.get(TRACEPARENT)
    if given is None or len(given) > LONGEST_ID:
        return None
    parts = given.split("-")
    if len(parts) < 4 or [len(part) for part in parts[:4]] != [2, 32, 16, 2] or not _HEX.issuperset("".join(parts[:4])):
        return None
    version, trace, parent, _flags = parts[:4]
    if version == "ff" or (version == "00" and len(parts) > 4):  # later versions may say more
        return None
    return trace if trace.strip("0") and parent.strip("0") else None


async def mark(request: web.Request, response: web.StreamResponse) -> None:
    """Signal handler for `on_response_prepare`: every response says which request it answers, and not what runs here."""
    response.headers.pop(hdrs.SERVER, None)
    if (record := request.get(RECORD)) is not None and record.http_request_id is not None:
        response.headers[X_REQUEST_ID] = record.http_request_id
        if dialect_of(request) is Dialect.ANTHROPIC:
            response.headers[ANTHROPIC_REQUEST_ID] = record.http_request_id
