"""From the bytes of a request to a proven body, or a refusal in the words TGI's web framework uses.

These refusals are plain text, not TGI's error object, because TGI answers them before its own code runs.
"""

from __future__ import annotations

from typing import TypeVar

import orjson
from aiohttp import web
from pydantic import ValidationError

from text_generation_router.api.schemas import Body

BodyT = TypeVar("BodyT", bound=Body)


class BodyRejected(Exception):
    """The body never became a request. `str()` is the text of the answer."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


async def parse_body(request: web.Request, schema: type[BodyT]) -> BodyT:
    """Read and check the body, at most the application's `client_max_size` of it. Raises BodyRejected."""
    content_type = request.content_type
    if content_type != "application/json" and not (
        content_type.startswith("application/") and content_type.endswith("+json")
    ):
        raise BodyRejected(415, "Expected request with `Content-Type: application/json`")
    raw = await _read(request)
    try:
        # orjson is RFC 8259 to the letter (no NaN, no lone surrogates, bounded nesting), which pydantic's parser is not.
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise BodyRejected(
            400, f"Failed to parse the request body as JSON: {error.msg} at line {error.lineno} column {error.colno}"
        ) from None
    try:
        return schema.model_validate(value)
    except ValidationError as error:
        raise BodyRejected(
            422, f"Failed to deserialize the JSON body into the target type: {_first_reason(error)}"
        ) from None


async def expect_continue(request: web.Request) -> web.StreamResponse | None:
    """Answer `Expect: 100-continue`: a body too large is refused before it is sent."""
    if (request.content_length or 0) > request.client_max_size:
        refusal = web.Response(status=413, text=str(_too_large()))
        refusal.force_close()
        return refusal
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    request.writer.output_size = 0  # the answer proper has not begun
    return None


async def _read(request: web.Request) -> bytes:
    if (request.content_length or 0) > request.client_max_size:
        raise _too_large()
    try:
        return await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise _too_large() from None
    except web.RequestPayloadError as error:  # broken chunks, broken compression
        raise BodyRejected(400, f"Failed to buffer the request body: {error}") from None


def _too_large() -> BodyRejected:
    return BodyRejected(413, "Failed to buffer the request body: length limit exceeded")


def _first_reason(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    path = ".".join(str(part) for part in first["loc"])
    if first["type"] == "missing":
        return f"missing field `{path}`"
    return f"{path}: {first['msg']}" if path else first["msg"]
