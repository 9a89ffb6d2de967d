"""From the bytes of a request to a proven body, or a refusal in the words TGI's web framework uses.

These refusals are plain text, not TGI's error object, because TGI answers them before its own code runs.
"""

from __future__ import annotations

from typing import Any, TypeVar

import orjson
from aiohttp import HttpVersion11, hdrs, web
from pydantic import ValidationError

from text_generation_router.api.http.schema import Body

BodyT = TypeVar("BodyT", bound=Body)


class BodyRejected(Exception):
    """The body never became a request. `str()` is the text of the answer."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


async def parse_body(request: web.Request, schema: type[BodyT]) -> BodyT:
    """Read and check the body, at most the application's `client_max_size` of it. Raises BodyRejected."""
    return validate(await parse_json(request), schema)


async def parse_json(request: web.Request) -> Any:  # noqa: ANN401 - a JSON value
    """The body as a JSON value, at most `client_max_size` of it. Raises BodyRejected."""
    content_type = request.content_type
    if content_type != "application/json" and not (
        content_type.startswith("application/") and content_type.endswith("+json")
    ):
        raise BodyRejected(415, "Expected request with `Content-Type: application/json`")
    raw = await _read(request)
    try:
        # orjson is RFC 8259 to the letter (no NaN, no lone surrogates, bounded nesting), which pydantic's parser is not.
        return orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise BodyRejected(
            400, f"Failed to parse the request body as JSON: {error.msg} at line {error.lineno} column {error.colno}"
        ) from None


def validate(value: object, schema: type[BodyT]) -> BodyT:
    """A JSON value as a proven body. Raises BodyRejected."""
    try:
        return schema.model_validate(value)
    except ValidationError as error:
        raise BodyRejected(
            422, f"Failed to deserialize the JSON body into the target type: {_first_reason(error)}"
        ) from None


async def expect_continue(request: web.Request) -> web.StreamResponse | None:
    """What aiohttp calls for `Expect: 100-continue`: nothing yet.

    The client may send once somebody is about to read: whoever has no key, or too large a body, keeps it.
    """
    return None


async def _read(request: web.Request) -> bytes:
    if (request.content_length or 0) > request.client_max_size:
        raise _too_large()
    if hdrs.EXPECT in request.headers and request.version >= HttpVersion11:
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # the answer proper has not begun
    try:
        return await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise _too_large() from None
    except web.RequestPayloadError as error:  # broken chunks, broken compression
        raise BodyRejected(400, f"Failed to buffer the request body: {error}") from None


def _too_large() -> BodyRejected:
    return BodyRejected(413, "Failed to buffer the request body: length limit exceeded")


def _first_reason(error: ValidationError) -> str:
    """The first error; of a field that may be several things, what the one that fits best lacks: the deepest error.

    There are no more of them than a body has fields, because every list of a body ends at its first wrong entry
    (`schema.py`): pydantic cannot be asked for some of its errors only.
    """
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    field = errors[0]["loc"][:1]
    first = max((one for one in errors if one["loc"][:1] == field), key=lambda one: len(one["loc"]))
    path = ".".join(str(part) for part in first["loc"])
    if first["type"] == "missing":
        return f"missing field `{path}`"
    return f"{path}: {first['msg']}" if path else first["msg"]
