"""Around every route: failures become answers, each request leaves one record, browsers may call."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import structlog
from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware

from text_generation_router.api.bodies import BodyRejected
from text_generation_router.api.record import CLIENT_LEFT, RECORD, Record, finish
from text_generation_router.api.sse import error_object
from text_generation_router.errors import IncompleteGeneration, ServingError
from text_generation_router.metrics import Metrics

log = structlog.get_logger()


def answering(metrics: Metrics) -> Middleware:
    """Every request gets an answer, whatever its handler raises, and leaves a record."""

    @web.middleware
    async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
        record = request[RECORD] = Record()
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
    except ServingError as error:
        request[RECORD].failed(error)
        return error_response(error)
    except BodyRejected as error:
        refusal = web.Response(status=error.status, text=str(error))
        if error.status == web.HTTPRequestEntityTooLarge.status_code:
            # What is still coming is read away for a while, so that the client lives to see this; then we hang up.
            refusal.force_close()
        return refusal
    except web.HTTPException as error:  # no such route or method: TGI's framework sends no body
        allow = error.headers.get(hdrs.ALLOW)
        return web.Response(status=error.status, headers={hdrs.ALLOW: allow} if allow else None)
    except ConnectionError:
        raise
    except Exception as error:  # a bug: logged whole, told in one word
        log.exception("request handler failed", route=request.path)
        if request.writer.output_size > 0:
            raise ConnectionAbortedError("failed after the first byte") from error
        incomplete = IncompleteGeneration()
        request[RECORD].failed(incomplete)
        return error_response(incomplete)


def error_response(error: ServingError) -> web.Response:
    """TGI's error object under its status."""
    return web.Response(status=error.status, body=error_object(error), content_type="application/json")


class Cors:
    """Cross-origin calls from browsers, from the given origins or from any."""

    def __init__(self, allowed_origins: Sequence[str]) -> None:
        self._any = not allowed_origins or "*" in allowed_origins
        self._origins = frozenset(allowed_origins)

    def middleware(self) -> Middleware:
        """Answers preflight requests, whatever the route."""

        @web.middleware
        async def preflight(request: web.Request, handler: Handler) -> web.StreamResponse:
            if request.method == hdrs.METH_OPTIONS and hdrs.ACCESS_CONTROL_REQUEST_METHOD in request.headers:
                return web.Response(
                    headers={
                        hdrs.ACCESS_CONTROL_ALLOW_METHODS: "GET,POST",
                        # TGI forgets authorization, so that no browser can send a key.
                        hdrs.ACCESS_CONTROL_ALLOW_HEADERS: "content-type,authorization",
                    }
                )
            return await handler(request)

        return preflight

    async def mark(self, request: web.Request, response: web.StreamResponse) -> None:
        """Signal handler for `on_response_prepare`: says whether this origin may read the response."""
        if self._any:
            response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = "*"
            return
        response.headers.add(hdrs.VARY, "origin")
        origin = request.headers.get(hdrs.ORIGIN)
        if origin in self._origins:
            response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = origin
