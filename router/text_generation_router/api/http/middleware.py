"""Middleware around every route: errors become responses, each request leaves one log line, browsers may call (CORS).

Requests are correlated across services by `x-request-id`, which every response repeats, and by W3C's `traceparent`.
"""

import asyncio
import random
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware

from text_generation_common.log import log
from text_generation_common.panics import as_exception
from text_generation_proto.values import TraceContext
from text_generation_router import errors
from text_generation_router.api.http.caller import HEADERS
from text_generation_router.api.http.dialects import Dialect, dialect_of, error_response
from text_generation_router.api.http.keys import X_API_KEY
from text_generation_router.api.http.record import RECORD, Record, finish
from text_generation_router.api.http.routes import unknown_route
from text_generation_router.api.http.spans import RequestSpans
from text_generation_router.cluster_interface import ClusterInterface
from text_generation_router.metrics import HttpMetrics
from text_generation_router.web.body_reader import PREPARATION
from text_generation_router.web.connections import connection_of
from text_generation_router.web.refusals import RefusalLimiter

X_REQUEST_ID = "x-request-id"
ANTHROPIC_REQUEST_ID = "request-id"
"""Name of the same header for Anthropic's clients."""
TRACEPARENT, TRACESTATE = "traceparent", "tracestate"
MAX_TRACESTATE_LENGTH = 512
"""Longest `tracestate` that is passed on: W3C's recommendation asks for at least that."""
MAX_ID_LENGTH = 128
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")
"""Version, trace, parent and flags; in versions after 00 there may be more parts."""
_ids = random.Random()  # ids are unique, not secret: the system's random numbers cost a system call

# ----------------------------------------------------------------------------------------------------- errors and records


def answering(metrics: HttpMetrics, spans: RequestSpans | None = None) -> Middleware:
    """The middleware that turns exceptions into responses and keeps a record of each request.

    With `spans` it traces them, too.
    """
    refusals = RefusalLimiter()

    @web.middleware
    async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
        record = request[RECORD] = Record()
        record.http_request_id = request_id(request.headers)
        context = trace_context(request.headers)
        if context is not None:
            record.trace_id = context.trace_id
            is_sampled = int(context.traceparent.split("-")[3], 16) & 1
            record.trace = context if is_sampled else None
        if spans is not None:
            spans.begin(record, request, context)
        status = errors.ClientLeft.status
        try:
            with ExitStack() as request[PREPARATION]:
                response = await _answer(request, handler)
            status = response.status
        except (asyncio.CancelledError, ConnectionError) as error:
            record.error = record.error or errors.ClientLeft
            forget_frames(error)
            raise
        finally:
            finish(record, request, status, metrics, refusals)
            if record.span is not None and spans is not None:
                spans.end(record, record.span, request, status)
        return response

    return answer


async def _answer(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except (ConnectionError, asyncio.CancelledError):
        raise
    except BaseException as error:  # noqa: BLE001 - every error, also a panic, becomes a response here
        response = _failed(request, as_exception(error))
        forget_frames(error)
    if hdrs.EXPECT in request.headers:
        # The client may now send its body or not; the next bytes on this connection are ambiguous.
        response.force_close()
    return response


def forget_frames(error: BaseException) -> None:
    """Drop the tracebacks of an error and of those behind it.

    A frame refers to the body of its request, and often to the error, through a future or a task. Such a cycle would keep
    the body until the next garbage collection.
    """
    waiting: list[BaseException | None] = [error]
    while waiting:
        if (other := waiting.pop()) is None:
            continue
        waiting += (other.__cause__, other.__context__, *getattr(other, "exceptions", ()))
        other.__traceback__ = other.__cause__ = other.__context__ = None


def _failed(request: web.Request, error: Exception) -> web.Response:
    if isinstance(error, web.HTTPNotFound):
        error = unknown_route(request)
    allowed = ""
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = error.headers[hdrs.ALLOW]
        error = errors.MethodNotAllowed(f"{request.method} is not allowed here, only {allowed}")
    if not isinstance(error, errors.ServingError):
        log.error("request handler failed", route=request.path, exc_info=error)
        cause, error = error, errors.IncompleteGeneration()
        if request.writer.output_size > 0:
            request[RECORD].failed(error)
            raise ConnectionAbortedError("failed after the first byte") from cause
    request[RECORD].failed(error)
    response = error_response(dialect_of(request), error)
    if allowed:
        response.headers[hdrs.ALLOW] = allowed
    return response


# ------------------------------------------------------------------------------------------------------------ correlation


def request_id(headers: Mapping[str, str]) -> str:
    """The client's id of the request if it is fit for a header and a log line, else a new one."""
    given = headers.get(X_REQUEST_ID)
    if given and len(given) <= MAX_ID_LENGTH and given.isascii() and given.isprintable() and " " not in given:
        return given
    return f"{_ids.getrandbits(128):032x}"


def trace_context(headers: Mapping[str, str]) -> TraceContext | None:
    """The trace of the client in `traceparent` (W3C Trace Context, level 1); None if absent or invalid."""
    given = headers.get(TRACEPARENT)
    if given is None or len(given) > MAX_ID_LENGTH:
        return None
    parts = _TRACEPARENT.fullmatch(given)
    if parts is None or (parts[1] and given.startswith("00")):
        return None
    state = headers.get(TRACESTATE, "")
    return TraceContext(given, state if len(state) <= MAX_TRACESTATE_LENGTH and state.isascii() else "")


async def end_preparation(request: web.Request, response: web.StreamResponse) -> None:
    """Signal handler for `on_response_prepare`: release what was held to prepare the request."""
    if (preparation := request.get(PREPARATION)) is not None:
        preparation.close()


async def add_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """Signal handler for `on_response_prepare`: add the request id, remove the server's name."""
    response.headers.pop(hdrs.SERVER, None)
    if (record := request.get(RECORD)) is not None and record.http_request_id is not None:
        response.headers[X_REQUEST_ID] = record.http_request_id
        if dialect_of(request) is Dialect.ANTHROPIC:
            response.headers[ANTHROPIC_REQUEST_ID] = record.http_request_id


# ------------------------------------------------------------------------------------------------------------------- CORS

_REQUEST_HEADERS = ",".join(
    (
        *("authorization", "content-type", X_API_KEY, X_REQUEST_ID, TRACEPARENT, TRACESTATE, *HEADERS),
        *("anthropic-version", "anthropic-beta", "anthropic-dangerous-direct-browser-access"),
        *("openai-beta", "openai-organization", "openai-project"),
    )
)
_RESPONSE_HEADERS = ",".join(
    (
        *(X_REQUEST_ID, ANTHROPIC_REQUEST_ID, "retry-after", "www-authenticate"),
        *("x-compute-type", "x-compute-characters", "x-compute-time", "x-total-time", "x-validation-time"),
        *("x-queue-time", "x-inference-time", "x-time-per-token"),
        *("x-prompt-tokens", "x-generated-tokens", "x-cached-tokens"),
    )
)
_MAX_AGE_S = "7200"
"""Seconds for which a browser may cache a preflight response; browsers allow no more."""


class Cors:
    """Cross-origin calls from browsers, from the given origins or from any.

    Only the origin is checked. Every request header is allowed, because the clients' own headers (`x-stainless-…`) change
    with their versions.
    """

    def __init__(self, allowed_origins: Sequence[str], same_origin: Collection[web.AbstractRoute] = ()) -> None:
        """`same_origin`: routes without CORS headers."""
        self._any = not allowed_origins or "*" in allowed_origins
        self._origins = frozenset(allowed_origins)
        self._same_origin = frozenset(same_origin)

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer preflight requests, on every path and without a key: browsers send none."""
        if request.method == hdrs.METH_OPTIONS and hdrs.ACCESS_CONTROL_REQUEST_METHOD in request.headers:
            asked = request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS)
            return web.Response(
                headers={
                    hdrs.ACCESS_CONTROL_ALLOW_METHODS: "GET,POST",
                    hdrs.ACCESS_CONTROL_ALLOW_HEADERS: asked or _REQUEST_HEADERS,
                    hdrs.ACCESS_CONTROL_MAX_AGE: _MAX_AGE_S,
                    hdrs.VARY: hdrs.ACCESS_CONTROL_REQUEST_HEADERS,
                }
            )
        return await handler(request)

    async def add_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        """Signal handler for `on_response_prepare`: allow the origin to read the response."""
        if request.match_info.route in self._same_origin:
            return
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


# ------------------------------------------------------------------------------------------------------------------- gate


class Gate:
    """Refuses requests by the state of the server and of their connection: on the management port, beyond the limit, while draining.

    Probes and /metrics are always answered.
    """

    def __init__(self, always: Collection[web.AbstractRoute], cluster: ClusterInterface) -> None:
        """`always`: the routes that are answered in every state."""
        self._always = frozenset(always)
        self._cluster = cluster

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuse. It comes before the check of keys."""
        if request.match_info.route not in self._always:
            connection = connection_of(request)
            if connection.management:
                raise errors.UnknownRoute
            if connection.probes_only:
                raise errors.TooManyConnections
            if self._cluster.draining:
                raise errors.Draining
        return await handler(request)

    async def close_connection(self, request: web.Request, response: web.StreamResponse) -> None:
        """Signal handler for `on_response_prepare`: while it stops, and beyond the limit, a response is the last one."""
        if self._cluster.stopping or connection_of(request).probes_only:
            response.headers[hdrs.CONNECTION] = "close"
            response.force_close()
