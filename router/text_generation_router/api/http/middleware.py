"""Around every route: failures become answers, each request leaves one record, browsers may call."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import structlog
from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware

from text_generation_router.api.http import correlation
from text_generation_router.api.http.bodies import BodyRejected
from text_generation_router.api.http.caller import HEADERS
from text_generation_router.api.http.dialects import dialect_of, error_response, refusal
from text_generation_router.api.http.record import CLIENT_LEFT, RECORD, Record, finish
from text_generation_router.errors import IncompleteGeneration, ServingError
from text_generation_router.metrics import Metrics

log = structlog.get_logger()


def answering(metrics: Metrics) -> Middleware:
    """Every request gets an answer, whatever its handler raises, and leaves a record."""

    @web.middleware
    async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
        record = request[RECORD] = Record()
        record.http_request_id = correlation.request_id(request.headers)
        record.trace_id = correlation.trace_id(request.headers)
        status = CLIENT_LEFT
        try:
            response = await _answer(request, handler)
            status = response.status
        except (asyncio.CancelledError, ConnectionError):
            record.error_type = record.error_type or "dropped"
            raise
        finally:
            finish(record, request, status, metrics)
        return response

    return answer


async def _answer(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except ConnectionError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever it is, it becomes an answer here
        response = _failed(request, error)
    if hdrs.EXPECT in request.headers:
        # Whether the client now sends its body or drops it is its choice, so what follows cannot be told apart.
        response.force_close()
    return response


def _failed(request: web.Request, error: Exception) -> web.Response:
    dialect = dialect_of(request)
    if isinstance(error, ServingError):
        request[RECORD].failed(error)
        return error_response(dialect, error)
    if isinstance(error, BodyRejected):
        response = refusal(dialect, error.status, str(error), str(error))
        if error.status == web.HTTPRequestEntityTooLarge.status_code:
            # What is still coming is read away for a while, so that the client lives to see this; then we hang up.
            response.force_close()
        return response
    if isinstance(error, web.HTTPException):  # no such route or method: TGI's framework sends no body
        response = refusal(dialect, error.status, error.reason, "")
        if allow := error.headers.get(hdrs.ALLOW):
            response.headers[hdrs.ALLOW] = allow
        return response
    # A bug: logged whole, told in one word.
    log.error("request handler failed", route=request.path, exc_info=error)
    incomplete = IncompleteGeneration()
    request[RECORD].failed(incomplete)
    if request.writer.output_size > 0:
        raise ConnectionAbortedError("failed after the first byte") from error
    return error_response(dialect, incomplete)


_REQUEST_HEADERS = ",".join(
    (
        "authorization",  # TGI forgets it, so that no browser can send a key
        "content-type",
        "x-api-key",
        "x-request-id",
        "traceparent",
        "tracestate",
        *HEADERS,
        "anthropic-version",
        "anthropic-beta",
        "anthropic-dangerous-direct-browser-access",
        "openai-beta",
        "openai-organization",
        "openai-project",
    )
)
_RESPONSE_HEADERS = ",".join(
    (
        "x-request-id",
        "request-id",  # Anthropic's name of it
        "retry-after",
        "www-authenticate",
        "x-compute-type",
        "x-compute-characters",
        "x-compute-time",
        "x-total-time",
        "x-validation-time",
        "x-queue-time",
        "x-inference-time",
        "x-time-per-token",
        "x-prompt-tokens",
        "x-generated-tokens",
        "x-cached-tokens",
    )
)
_REMEMBERED_S = "7200"
"""How long a browser need not ask again; none remembers it for longer."""


class Cors:
    """Cross-origin calls from browsers, from the given origins or from any.

    Origins are what is judged. Any request header may be sent: a page that may call may say what it likes, and the
    clients' own headers (`x-stainless-…`) change with their versions.
    """

    def __init__(self, allowed_origins: Sequence[str]) -> None:
        self._any = not allowed_origins or "*" in allowed_origins
        self._origins = frozenset(allowed_origins)

    def middleware(self) -> Middleware:
        """Answers preflight requests, whatever the route and without a key: browsers send none with them."""

        @web.middleware
        async def preflight(request: web.Request, handler: Handler) -> web.StreamResponse:
            if request.method == hdrs.METH_OPTIONS and hdrs.ACCESS_CONTROL_REQUEST_METHOD in request.headers:
                asked = request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS)
                return web.Response(
                    headers={
                        hdrs.ACCESS_CONTROL_ALLOW_METHODS: "GET,POST,DELETE",
                        hdrs.ACCESS_CONTROL_ALLOW_HEADERS: asked or _REQUEST_HEADERS,
                        hdrs.ACCESS_CONTROL_MAX_AGE: _REMEMBERED_S,
                        hdrs.VARY: hdrs.ACCESS_CONTROL_REQUEST_HEADERS,
                    }
                )
            return await handler(request)

        return preflight

    async def mark(self, request: web.Request, response: web.StreamResponse) -> None:
        """Signal handler for `on_response_prepare`: says whether this origin may read the response."""
        headers = response.headers
        origin = request.headers.get(hdrs.ORIGIN)
        if self._any:
            headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = "*"
        else:
            headers.add(hdrs.VARY, "origin")
            if origin not in self._origins:
                return
            headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = origin
        if origin is not None:
            headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = _RESPONSE_HEADERS
