"""Base classes of request and response bodies, and the reading of request bodies.

As in TGI (serde), values are not coerced, numbers have a size, and unknown fields are ignored.
"""

from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any, ClassVar, TypeVar

import orjson
from aiohttp import HttpVersion11, hdrs, web
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator, with_config
from typing_extensions import TypedDict

from text_generation_router.errors import NotSupported
from text_generation_router.large_inputs import run_in_thread_if_large
from text_generation_router.web.body_errors import BodyTooLarge, InvalidJson, UnsupportedMediaType, invalid_body
from text_generation_router.web.body_reader import BODIES, MAX_INLINE, Parts, encoding_of, length
from text_generation_router.web.structure import load

JSON = "application/json"
_NEUTRAL = (("n", 1), ("best_of", 1), ("repetition_penalty", 1))
"""Values of refused fields that ask for nothing, beside those that are false."""


class Body(BaseModel):
    """Base of every request body."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, use_attribute_docstrings=True)

    refused: ClassVar[Mapping[str, str]] = {}
    """Fields of other APIs with a known meaning, and what to do instead."""
    unserved: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """Fields that no body serves, and their values that ask for nothing."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_other_fields(cls, value: Any) -> Any:  # noqa: ANN401 - any JSON value
        # Called for each object. Pydantic's own code never gives up the interpreter's lock, a call into Python does.
        if (cls.refused or cls.unserved) and isinstance(value, dict):
            for name in sorted(cls.unserved.keys() & value.keys()):
                if value[name] not in cls.unserved[name]:
                    raise NotSupported(f"`{name}` is not supported by this server")
            for name in sorted(cls.refused.keys() & value.keys() - cls.model_fields.keys()):
                if value[name] and (name, value[name]) not in _NEUTRAL:
                    raise NotSupported(". ".join(filter(None, (f"`{name}` is not supported here", cls.refused[name]))))
        return value


@with_config(ConfigDict(extra="forbid", use_attribute_docstrings=True))
class ResponseBody(TypedDict):
    """Base of every response body: a dict at run time, checked by mypy, described in the OpenAPI document."""


BodyT = TypeVar("BodyT", bound=Body)
T = TypeVar("T")
MAX_WRITTEN_AT_ONCE = 1 << 20
"""Bytes of a response that is written at once."""
LARGE_BODY = web.RequestKey("large_body", bool)
"""True if the body is longer than that."""
MODEL = web.RequestKey("model", str)
"""The name of the model in the body, else that of the server's model."""


async def parse_body(request: web.Request, schema: type[BodyT]) -> BodyT:
    """Read and validate the body, up to the application's `client_max_size`. Raises BodyRejected."""
    return await parse_json(request, lambda value: validate(value, schema))


async def parse_json(request: web.Request, read: Callable[[Any], T]) -> T:
    """Read the body, up to `client_max_size`, and return what `read` makes of its JSON value. Raises BodyRejected."""
    content_type = request.content_type
    if content_type != JSON and not (content_type.startswith("application/") and content_type.endswith("+json")):
        raise UnsupportedMediaType
    encoding = encoding_of(request)
    parts = await _read(request, encoding)
    request[LARGE_BODY] = length(parts) > MAX_INLINE
    body = await beside(request, lambda: read(_loads(parts)))
    if model := getattr(body, "model", None):
        request[MODEL] = model
    return body


async def beside(request: web.Request, work: Callable[[], T]) -> T:
    """Return the result of `work` on the body of a request: on a thread of its own if the body is large."""
    return await run_in_thread_if_large(work, large=request[LARGE_BODY])


def _loads(parts: Parts) -> Any:  # noqa: ANN401 - any JSON value
    raw = b"".join(parts)
    parts.clear()
    try:
        # orjson implements RFC 8259 exactly (no NaN, no lone surrogates, bounded nesting); pydantic's parser does not.
        return load(raw)
    except orjson.JSONDecodeError as error:
        position = f"at line {error.lineno} column {error.colno}"
        raise InvalidJson(f"Failed to parse the request body as JSON: {error.msg} {position}") from None


def validate(value: object, schema: type[BodyT]) -> BodyT:
    """Return a JSON value as a validated body. Raises InvalidBody."""
    try:
        return schema.model_validate(value)
    except ValidationError as error:
        raise invalid_body(error, value) from None


def pop_each(entries: list[T]) -> Iterator[T]:
    """Yield the entries of a list of a body and remove them.

    The body lives as long as its request. Its entries take far more memory than their JSON, and to free them all at once would hold
    up the event loop.
    """
    entries.reverse()
    while entries:
        yield entries.pop()


def compact_json(value: object) -> bytes:
    """Return a small part of a response as JSON, in memory of its size.

    orjson shrinks a buffer of 1,024 bytes in place: many of its results leave as much memory between them that nothing fits.
    """
    return b"%b" % orjson.dumps(value)


def json_response(value: object) -> web.Response:
    return web.Response(body=orjson.dumps(value), content_type=JSON)


async def json_parts_response(
    request: web.Request, parts: AsyncIterator[bytes], headers: Mapping[str, str]
) -> web.StreamResponse:
    """Respond with JSON whose parts are made one after the other. A long response is written while it is made."""
    begun: list[bytes] = []
    async for part in parts:
        begun.append(part)
        if sum(map(len, begun)) > MAX_WRITTEN_AT_ONCE:
            break
    else:
        return web.Response(body=b"".join(begun), content_type=JSON, headers=headers)
    response = web.StreamResponse(headers={**headers, hdrs.CONTENT_TYPE: JSON})
    if request.version < HttpVersion11:
        response.force_close()  # HTTP/1.0: the body ends with the connection
    await response.prepare(request)
    for part in begun:
        await response.write(part)
    begun.clear()
    async for part in parts:
        await response.write(part)
    await response.write_eof()
    return response


async def expect_continue(request: web.Request) -> web.StreamResponse | None:
    """Ignore `Expect: 100-continue` for now; aiohttp calls this before the handler.

    `parse_json` asks for the body, so a client without a valid key, or with too large a body, never sends it.
    """
    return None


async def _read(request: web.Request, encoding: str) -> Parts:
    if (request.content_length or 0) > request.client_max_size:
        raise BodyTooLarge(f"{request.client_max_size} bytes")
    if hdrs.EXPECT in request.headers and request.version >= HttpVersion11:
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # the final response has not begun
    try:
        return await request.app[BODIES].read(request, encoding)
    except web.RequestPayloadError as error:  # broken chunks
        raise InvalidJson(f"Failed to buffer the request body: {error}") from None
