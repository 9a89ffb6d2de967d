"""The HTTP application: handlers, routes, middleware."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from aiohttp import web

from text_generation_router.api.core.serving import Serving
from text_generation_router.api.http.keys import tenant_of
from text_generation_router.api.http.middleware import Cors, Gate, add_request_id, answering, end_preparation
from text_generation_router.api.http.routes import Route, add_routes
from text_generation_router.api.http.spans import RequestSpans
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
