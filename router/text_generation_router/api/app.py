"""The HTTP application: handlers, routes, middleware; and that of a router that knows no shard yet: alive, not ready."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from aiohttp import web

from text_generation_router.api.core.serving import Serving
from text_generation_router.api.http.dialects import dialect_of_path, error_response
from text_generation_router.api.http.keys import tenant_of
from text_generation_router.api.http.middleware import Cors, Gate, add_request_id, answering, end_preparation
from text_generation_router.api.http.routes import Route, add_routes
from text_generation_router.api.http.spans import RequestSpans
from text_generation_router.discovery.source import UNABLE
from text_generation_router.errors import Unhealthy
from text_generation_router.metrics import CONTENT_TYPE
from text_generation_router.metrics.scheduler import no_replicas_text
from text_generation_router.web.body_reader import BODIES, BodyReader

if TYPE_CHECKING:
    from text_generation_common.tracer import Tracer


def create_app(serving: Serving, table: Sequence[Route], tracer: "Tracer | None" = None) -> web.Application:
    """Return the application with the routes of `table`. Run it with `handler_cancellation=True`, so that a client that leaves ends its request."""
    settings, metrics = serving.settings, serving.metrics
    app = web.Application(client_max_size=settings.config.payload_limit)
    app[BODIES] = BodyReader(settings.config.payload_limit, settings.body_s, serving.stage, tenant_of)
    rows = add_routes(app, table)
    gate = Gate([added for added, route in rows.items() if route.probe or route.always], serving.cluster)
    spans = None if tracer is None else RequestSpans(tracer, settings.model_id)
    keyless = [added for added, route in rows.items() if route.probe or route.public]
    cors = Cors(settings.config.cors_allow_origin, [added for added, route in rows.items() if route.same_origin])
    keys = settings.api_keys.middleware(keyless)
    app.middlewares.extend([answering(metrics, spans), gate.middleware, cors.middleware, keys])
    app.on_response_prepare.extend([end_preparation, cors.add_headers, add_request_id, gate.close_connection])
    return app


def create_starting_app(reached: Callable[[], bool]) -> web.Application:
    """Return an application that answers /health/live with 200, shows no replicas at /metrics, and refuses the rest with 503.

    `reached` tells whether a shard has answered: before, its peers must keep theirs.
    """

    async def live(request: web.Request) -> web.StreamResponse:
        return web.Response(headers={} if reached() else {UNABLE: "it has reached no shard"})

    async def metrics(request: web.Request) -> web.StreamResponse:
        return web.Response(body=no_replicas_text().encode(), headers={"Content-Type": CONTENT_TYPE})

    async def refuse(request: web.Request) -> web.StreamResponse:
        response = error_response(dialect_of_path(request.path), Unhealthy("no shard has joined yet"))
        response.force_close()
        return response

    app = web.Application()
    app.router.add_get("/health/live", live)
    app.router.add_get("/metrics", metrics)
    app.router.add_route("*", "/{path:.*}", refuse)
    return app
