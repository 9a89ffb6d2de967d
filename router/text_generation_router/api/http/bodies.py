"""Base classes and types of request and response bodies, and the reading of request bodies.

As in TGI (serde), values are not coerced, numbers have a size, and unknown fields are ignored.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, TypeVar

import orjson
from aiohttp import HttpVersion11, hdrs, web
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    GetPydanticSchema,
    ValidationError,
    WithJsonSchema,
    model_validator,
    with_config,
)
from pydantic_core import ErrorDetails
from typing_extensions import TypeAliasType, TypedDict

from text_generation_router.api.http.body_errors import BodyTooLarge, InvalidJson, UnsupportedMediaType
from text_generation_router.api.http.body_reader import BODIES, MAX_INLINE
from text_generation_router.api.http.body_reasons import Place, invalid_body
from text_generation_router.api.http.content_encoding import encoding_of
from text_generation_router.api.http.structure import check_structure
from text_generation_router.aside import aside
from text_generation_router.errors import NotSupported

JSON = "application/json"


# ---------------------------------------------------------------------------------------------------------------- schemas


_NEUTRAL = (("n", 1), ("best_of", 1), ("repetition_penalty", 1))
"""Values of refused fields that ask for nothing, beside those that are false."""


class Body(BaseModel):
    """Base of every request body."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, use_attribute_docstrings=True)

    refused: ClassVar[Mapping[str, str]] = {}
    """Fields of other APIs with a known meaning, and what to do instead."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_other_fields(cls, value: Any) -> Any:  # noqa: ANN401 - any JSON value
        # Called for each object. Pydantic's own code never gives up the interpreter's lock, a call into Python does.
        if cls.refused and isinstance(value, dict):
            for name in sorted(cls.refused.keys() & value.keys() - cls.model_fields.keys()):
                if value[name] and (name, value[name]) not in _NEUTRAL:
                    raise NotSupported(". ".join(filter(None, (f"`{name}` is not supported here", cls.refused[name]))))
        return value


@with_config(ConfigDict(extra="forbid", use_attribute_docstrings=True))
class ResponseBody(TypedDict):
    """Base of every response body: a dict at run time, checked by mypy, described in the OpenAPI document."""


WrittenNumber = Annotated[orjson.Fragment, GetPydanticSchema(lambda _, schema_of: schema_of(float))]
"""A number, already written as JSON."""
WrittenLogprob = Annotated[orjson.Fragment, GetPydanticSchema(lambda _, schema_of: schema_of(float | None))]
"""A log-probability, already written as JSON; null if unknown."""
WrittenJson = Annotated[orjson.Fragment, GetPydanticSchema(lambda _, schema_of: schema_of(Any))]
"""Any value, already written as JSON."""


_FLOAT32 = struct.Struct("<f")  # native "f" would turn 1e39 into infinity


def _to_float32(value: float) -> float:
    """The nearest 32-bit float. TGI's rules apply to it: 1e-46 is 0, 0.99999999999 is 1."""
    try:
        rounded: float = _FLOAT32.unpack(_FLOAT32.pack(value))[0]
    except OverflowError:
        raise ValueError("must be a number of 32 bits") from None
    return rounded


Float32 = Annotated[float, AfterValidator(_to_float32)]
Int32 = Annotated[int, Field(ge=-(2**31), lt=2**31)]
UInt32 = Annotated[int, Field(ge=0, lt=2**32)]
UInt64 = Annotated[int, Field(ge=0, le=2**64 - 1)]

MAX_NAME = 256
"""Characters of a name, an id or another word of a client."""
MAX_MODEL_BYTES = 256
"""Bytes of the name of a model as JSON: every chunk of a stream repeats it."""
MAX_STOP_CHARACTERS = 1024
"""Characters of a stop string: each new token is compared with it."""
MAX_STOPS = 1024
"""Stop strings that are read; `--max-stop-sequences` limits those that are used."""
MAX_METADATA_CHARACTERS = 512
"""OpenAI's limit for a value of `metadata`."""


def _short_as_json(name: str) -> str:
    if len(orjson.dumps(name)) - len('""') > MAX_MODEL_BYTES:
        raise ValueError(f"must have at most {MAX_MODEL_BYTES} bytes")
    return name


ObjectOrText = Annotated[dict[str, Any] | str, WithJsonSchema({"type": "object", "additionalProperties": True})]
"""An object, or its JSON as text, which the OpenAPI document leaves out."""
Name = Annotated[str, Field(max_length=MAX_NAME)]
ModelName = Annotated[Name, AfterValidator(_short_as_json)]
StopText = Annotated[str, Field(max_length=MAX_STOP_CHARACTERS)]

# Validation of a list stops at its first invalid entry, so that a list of half a million is refused as fast as a short
# one. These are aliases because FailFast cannot be part of a union.
StopTexts = TypeAliasType("StopTexts", Annotated[list[StopText], FailFast(), Field(max_length=MAX_STOPS)])
TokenIds = TypeAliasType("TokenIds", Annotated[list[UInt32], FailFast()])

MAX_METADATA = 16
"""OpenAI's limit for the keys of `metadata`."""


def at_most(limit: int, what: str) -> Callable[[Any], Any]:
    """A validator that refuses an object of more than `limit` keys before any key is validated.

    Pydantic has no FailFast for objects.
    """

    def counted(value: Any) -> Any:  # noqa: ANN401 - any JSON value
        if isinstance(value, dict) and len(value) > limit:
            raise ValueError(f"must have at most {limit} {what}")
        return value

    return counted


TextMetadata = TypeAliasType(
    "TextMetadata",
    Annotated[
        dict[Name, Annotated[str, Field(max_length=MAX_METADATA_CHARACTERS)]],
        BeforeValidator(at_most(MAX_METADATA, "keys")),
    ],
)
AnyMetadata = TypeAliasType("AnyMetadata", Annotated[dict[Name, Any], BeforeValidator(at_most(MAX_METADATA, "keys"))])

# ---------------------------------------------------------------------------------------------------------------- reading

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
    raw = await _read(request, encoding)
    request[LARGE_BODY] = len(raw) > MAX_INLINE
    body = await beside(request, lambda: read(_loads(raw)))
    if model := getattr(body, "model", None):
        request[MODEL] = model
    return body


async def beside(request: web.Request, work: Callable[[], T]) -> T:
    """Return the result of `work` on the body of a request: on a thread of its own if the body is large."""
    return await aside(work, large=request[LARGE_BODY])


def _loads(raw: bytes | bytearray) -> Any:  # noqa: ANN401 - any JSON value
    check_structure(raw)
    try:
        # orjson implements RFC 8259 exactly (no NaN, no lone surrogates, bounded nesting); pydantic's parser does not.
        return orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        position = f"at line {error.lineno} column {error.colno}"
        raise InvalidJson(f"Failed to parse the request body as JSON: {error.msg} {position}") from None


def validate(value: object, schema: type[BodyT]) -> BodyT:
    """Return a JSON value as a validated body. Raises InvalidBody.

    2.0 is an integer, as in JSON Schema, where an integer is required; elsewhere, as in a tool's schema, it stays 2.0.
    Such numbers are rare: they are looked for in a body that is refused otherwise.
    """
    done: set[Place] = set()
    while True:
        try:
            return schema.model_validate(value)
        except ValidationError as error:
            details = error.errors(include_url=False, include_context=False)
            places = {_any_entry(detail["loc"]) for detail in details if _is_whole(detail)} - done
            if not places:  # each round adds fields of the schema
                raise invalid_body(error, value) from None
        for place in places:
            value = _with_integers(value, place)
        done |= places


def _is_whole(detail: ErrorDetails) -> bool:
    """Return True if a value was refused that is an integer written as 2.0."""
    return detail["type"] == "int_type" and isinstance(detail["input"], float) and detail["input"].is_integer()


def _any_entry(place: Place) -> Place:
    """Return the place of an error with 0 for the index of every list: validation stops at a list's first invalid entry."""
    return tuple(0 if isinstance(part, int) else part for part in place)


def _with_integers(value: Any, place: Place) -> Any:  # noqa: ANN401 - any JSON value
    """Return a JSON value with each number such as 2.0 at a place, in all entries of its lists, as an integer.

    An integer that orjson cannot write stays a number.
    """
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**63:
        return int(value)
    if not place:
        return value
    first, *rest = place
    if isinstance(value, list) and isinstance(first, int):
        return [_with_integers(item, (*rest,)) for item in value]
    if isinstance(value, dict) and first in value:
        return {**value, first: _with_integers(value[first], (*rest,))}
    return _with_integers(value, (*rest,))  # the first part names a member of a union


def json_response(value: object) -> web.Response:
    """A response with a JSON body."""
    return web.Response(body=orjson.dumps(value), content_type=JSON)


async def json_parts_response(
    request: web.Request, parts: Sequence[bytes], headers: Mapping[str, str]
) -> web.StreamResponse:
    """Respond with JSON that is there in parts. A long response is written in parts: other requests run between them."""
    length = sum(map(len, parts))
    if length <= MAX_WRITTEN_AT_ONCE:
        return web.Response(body=b"".join(parts), content_type=JSON, headers=headers)
    response = web.StreamResponse(headers={**headers, hdrs.CONTENT_TYPE: JSON})
    response.content_length = length
    await response.prepare(request)
    for part in parts:
        await response.write(part)
        await asyncio.sleep(0)
    await response.write_eof()
    return response


async def expect_continue(request: web.Request) -> web.StreamResponse | None:
    """Ignore `Expect: 100-continue` for now; aiohttp calls this before the handler.

    `parse_json` asks for the body, so a client without a valid key, or with too large a body, never sends it.
    """
    return None


async def _read(request: web.Request, encoding: str) -> bytes | bytearray:
    if (request.content_length or 0) > request.client_max_size:
        raise BodyTooLarge(f"{request.client_max_size} bytes")
    if hdrs.EXPECT in request.headers and request.version >= HttpVersion11:
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # the final response has not begun
    try:
        return await request.app[BODIES].read(request, encoding)
    except web.RequestPayloadError as error:  # broken chunks
        raise InvalidJson(f"Failed to buffer the request body: {error}") from None
