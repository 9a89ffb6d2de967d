"""How a failure is told: one table, three dialects.

The status hangs on the cause alone, never on the route (`errors.py` has them). The words differ:

    TGI        {"error": text, "error_type": word}                      what its web framework refuses: plain text
    OpenAI     {"error": {"message", "type", "param", "code"}}          in a stream, [DONE] follows
    Anthropic  {"type": "error", "error": {"type", "message"}}          in a stream, as event: error; some have details
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import orjson
from aiohttp import hdrs, web

from text_generation_router.errors import (
    BatchTooLarge,
    DeadlineExceeded,
    Draining,
    GenerationFailed,
    IncompleteGeneration,
    InvalidRequest,
    NotFound,
    Overloaded,
    ServingError,
    SuffixNotSupported,
    TemplateError,
    ToolError,
    Unauthorized,
    Unhealthy,
)

SHOULD_RETRY = "x-should-retry"
"""OpenAI's and Anthropic's clients heed it, and would otherwise ask again twice for an answer that nobody waits for."""
DONE = b"data: [DONE]\n\n"
"""How OpenAI's streams end, whatever came before."""


@dataclass(frozen=True, slots=True)
class Words:
    """What OpenAI's and Anthropic's clients call a failure."""

    openai_type: str
    openai_code: str | None
    anthropic_type: str


_TABLE: dict[type[ServingError], Words] = {
    InvalidRequest: Words("invalid_request_error", None, "invalid_request_error"),
    TemplateError: Words("invalid_request_error", "template_error", "invalid_request_error"),
    ToolError: Words("invalid_request_error", "tool_error", "invalid_request_error"),
    BatchTooLarge: Words("invalid_request_error", "batch_size_exceeded", "invalid_request_error"),
    SuffixNotSupported: Words("invalid_request_error", "suffix_not_supported", "invalid_request_error"),
    Unauthorized: Words("invalid_request_error", "invalid_api_key", "authentication_error"),
    NotFound: Words("invalid_request_error", "not_found", "not_found_error"),
    Overloaded: Words("rate_limit_error", "overloaded", "rate_limit_error"),
    Draining: Words("server_error", "overloaded", "overloaded_error"),
    Unhealthy: Words("server_error", "healthcheck", "overloaded_error"),
    DeadlineExceeded: Words("timeout", "timeout", "timeout_error"),
    GenerationFailed: Words("server_error", "generation", "api_error"),
    IncompleteGeneration: Words("server_error", "incomplete_generation", "api_error"),
}
_REFUSED_BODY = {
    400: Words("invalid_request_error", "invalid_json", "invalid_request_error"),
    404: Words("invalid_request_error", "not_found", "not_found_error"),
    405: Words("invalid_request_error", "method_not_allowed", "invalid_request_error"),
    413: Words("invalid_request_error", "payload_too_large", "request_too_large"),
    415: Words("invalid_request_error", "unsupported_media_type", "invalid_request_error"),
    422: Words("invalid_request_error", None, "invalid_request_error"),
}
"""What the web framework refuses before a handler of ours runs, by status."""

RETRY_UNHEALTHY_S = 5
"""About as long as a shard takes to be started again."""
LONGEST_RETRY_S = 3600.0
"""No forecast is good for longer."""
_DEFAULT_WORDS = Words("server_error", None, "api_error")


class Dialect(Enum):
    """Whose words a route speaks."""

    TGI = "tgi"
    OPENAI = "openai"
    ANTHROPIC = "anthropic"


DIALECT = web.RequestKey("dialect", Dialect)
"""Set by a handler whose route speaks more than one."""
ROUTE_DIALECTS = web.AppKey("route_dialects", dict[web.AbstractRoute, Dialect])
"""Routes that speak another than their path says."""


def dialect_of(request: web.Request) -> Dialect:
    """The dialect of this request's answer."""
    if DIALECT in request:
        return request[DIALECT]
    own = request.app.get(ROUTE_DIALECTS, {})
    return own.get(request.match_info.route) or dialect_of_path(request.path)


def dialect_of_path(path: str) -> Dialect:
    """The dialect of a path, where its handler does not say otherwise."""
    if path.startswith("/v1/messages"):
        return Dialect.ANTHROPIC
    return Dialect.OPENAI if path.startswith("/v1/") else Dialect.TGI


def error_object(dialect: Dialect, error: ServingError) -> bytes:
    """The failure as JSON."""
    words = next((_TABLE[kind] for kind in type(error).__mro__ if kind in _TABLE), _DEFAULT_WORDS)
    if dialect is Dialect.TGI:
        return orjson.dumps({"error": str(error), "error_type": error.error_type})
    return _foreign_object(dialect, words, str(error), error.status, error.details)


def retry_after(error: ServingError) -> int | None:
    """Seconds after which to try again; None where it is no use, or nothing is known of it.

    Without a forecast: one second where places come free all the time, or where another router answers; a few where a
    shard must come back.
    """
    if isinstance(error, Overloaded):
        seconds = error.retry_after_s
        return 1 if seconds is None else max(1, math.ceil(min(LONGEST_RETRY_S, seconds)))
    if isinstance(error, Draining):
        return 1
    return RETRY_UNHEALTHY_S if isinstance(error, Unhealthy) else None


def error_response(dialect: Dialect, error: ServingError) -> web.Response:
    """The failure under its status."""
    headers: dict[str, str] = {}
    if isinstance(error, Unauthorized):
        headers[hdrs.WWW_AUTHENTICATE] = "Bearer"
    if (seconds := retry_after(error)) is not None:
        headers[hdrs.RETRY_AFTER] = str(seconds)
    if isinstance(error, DeadlineExceeded):
        headers[SHOULD_RETRY] = "false"
    if isinstance(error, Unauthorized) and dialect is Dialect.TGI:
        return web.Response(status=error.status, headers=headers)  # TGI's has no body
    return web.Response(
        status=error.status, body=error_object(dialect, error), content_type="application/json", headers=headers
    )


def refusal(dialect: Dialect, status: int, text: str, tgi_text: str) -> web.Response:
    """What the web framework refuses: TGI says it in plain text, or not at all."""
    if dialect is Dialect.TGI:
        return web.Response(status=status, text=tgi_text or None)
    body = _foreign_object(dialect, _REFUSED_BODY.get(status, _DEFAULT_WORDS), text, status)
    return web.Response(status=status, body=body, content_type="application/json")


ErrorEvent = Callable[[ServingError], bytes]
"""Writes a failure as the last events of a stream."""


def tgi_error_event(error: ServingError) -> bytes:
    """TGI's streams: the error object; nothing follows."""
    return b"data: %b\n\n" % error_object(Dialect.TGI, error)


def openai_error_event(error: ServingError) -> bytes:
    """OpenAI's streams: the error object, then the usual end."""
    return b"data: %b\n\n%b" % (error_object(Dialect.OPENAI, error), DONE)


def anthropic_error_event(error: ServingError) -> bytes:
    """Anthropic's streams: a named event; nothing follows."""
    return b"event: error\ndata: %b\n\n" % error_object(Dialect.ANTHROPIC, error)


def _foreign_object(
    dialect: Dialect, words: Words, text: str, status: int, details: dict[str, object] | None = None
) -> bytes:
    if dialect is Dialect.ANTHROPIC:
        more = {} if details is None else {"details": details}
        return orjson.dumps({"type": "error", "error": {"type": words.anthropic_type, "message": text, **more}})
    return orjson.dumps(
        {
            "error": {
                "message": text,
                "type": words.openai_type,
                "param": None,
                "code": words.openai_code,
                "http_status_code": status,  # TGI's chat streams have it
            }
        }
    )
