"""The dialects, and how each of them writes an error.

The status depends only on the error and on the dialect (`errors.py` has both). The bodies differ:

    TGI        {"error": text, "error_type": type}                   plain text or nothing where TGI's framework answers
    OpenAI     {"error": {"message", "type", "param", "code"}}       in a stream, [DONE] follows
    Anthropic  {"type": "error", "error": {"type", "message"}}       in a stream, as `event: error`
"""

from enum import Enum
from typing import Any, Literal, NotRequired

import orjson
from aiohttp import hdrs, web

from text_generation_router.error_attributes import TgiBody
from text_generation_router.errors import ServingError
from text_generation_router.web.bodies import JSON, ResponseBody

DONE = b"data: [DONE]\n\n"
"""Last event of every stream in OpenAI's dialect."""


class ErrorAnswer(ResponseBody):
    """An error in TGI's dialect."""

    error: str
    """The text."""
    error_type: str
    """A stable name for it."""


class OpenAIError(ResponseBody):
    """The error itself."""

    message: str
    type: str
    param: str | None
    code: str | None
    http_status_code: int
    """The status, as TGI's chat streams have it."""


class OpenAIErrorAnswer(ResponseBody):
    """An error in OpenAI's dialect."""

    error: OpenAIError


class AnthropicError(ResponseBody):
    """The error itself."""

    type: str
    message: str
    details: NotRequired[dict[str, Any]]
    """Machine-readable reasons."""


class AnthropicErrorAnswer(ResponseBody):
    """An error in Anthropic's dialect."""

    type: Literal["error"]
    error: AnthropicError


class Dialect(Enum):
    """The format of requests and responses on a route."""

    TGI = "tgi"
    OPENAI = "openai"
    ANTHROPIC = "anthropic"


ERROR_ANSWERS: dict[Dialect, Any] = {
    Dialect.TGI: ErrorAnswer,
    Dialect.OPENAI: OpenAIErrorAnswer,
    Dialect.ANTHROPIC: AnthropicErrorAnswer,
}

DIALECT = web.RequestKey("dialect", Dialect)
"""Set by a handler that serves several dialects."""
ROUTE_DIALECTS = web.AppKey("route_dialects", dict[web.AbstractRoute, tuple[Dialect, ...]])
"""The dialects of each route, the default first."""
ANTHROPIC_VERSION = "anthropic-version"
"""Header of every request of Anthropic's clients."""


def dialect_of(request: web.Request) -> Dialect:
    if DIALECT in request:
        return request[DIALECT]
    spoken = request.app.get(ROUTE_DIALECTS, {}).get(request.match_info.route)
    usual = dialect_of_path(request.path) if spoken is None else spoken[0]
    # An unknown route below /v1 may be OpenAI's or Anthropic's.
    may_be_anthropic = usual is Dialect.OPENAI if spoken is None else Dialect.ANTHROPIC in spoken
    return Dialect.ANTHROPIC if may_be_anthropic and ANTHROPIC_VERSION in request.headers else usual


def dialect_of_path(path: str) -> Dialect:
    """The usual dialect of a path."""
    if path.startswith("/v1/messages"):
        return Dialect.ANTHROPIC
    return Dialect.OPENAI if path.startswith("/v1/") else Dialect.TGI


def status_of(dialect: Dialect, error: ServingError | type[ServingError]) -> int:
    return error.status if dialect is Dialect.TGI else error.open_status


def error_answer(dialect: Dialect, error: ServingError) -> ErrorAnswer | OpenAIErrorAnswer | AnthropicErrorAnswer:
    match dialect:
        case Dialect.TGI:
            return {"error": error.tgi_prefix + str(error), "error_type": error.error_type}
        case Dialect.OPENAI:
            return {
                "error": {
                    "message": error.openai_text,
                    "type": error.openai_type,
                    "param": error.param,
                    "code": error.code,
                    "http_status_code": status_of(dialect, error),
                }
            }
        case Dialect.ANTHROPIC:
            inner: AnthropicError = {"type": error.anthropic_type, "message": error.anthropic_text}
            if error.anthropic_details is not None:
                inner["details"] = dict(error.anthropic_details)
            return {"type": "error", "error": inner}


def error_response(dialect: Dialect, error: ServingError) -> web.Response:
    headers = dict(error.headers)
    if error.retry_after is not None:
        headers[hdrs.RETRY_AFTER] = str(error.retry_after)
    response = web.Response(status=status_of(dialect, error), headers=headers)
    if dialect is not Dialect.TGI or error.tgi_body is TgiBody.JSON:
        response.body = orjson.dumps(error_answer(dialect, error))
        response.content_type = JSON
    elif error.tgi_body is TgiBody.TEXT:
        response.text = error.tgi_prefix + str(error)
    if error.closes_connection:
        response.force_close()
    return response


def tgi_error_event(error: ServingError) -> bytes:
    """TGI: the error object; nothing follows."""
    return b"data: %b\n\n" % orjson.dumps(error_answer(Dialect.TGI, error))


def openai_error_event(error: ServingError) -> bytes:
    """OpenAI: the error object, then [DONE]."""
    return b"data: %b\n\n%b" % (orjson.dumps(error_answer(Dialect.OPENAI, error)), DONE)


def anthropic_error_event(error: ServingError) -> bytes:
    """Anthropic: an event named `error`; nothing follows."""
    return b"event: error\ndata: %b\n\n" % orjson.dumps(error_answer(Dialect.ANTHROPIC, error))
