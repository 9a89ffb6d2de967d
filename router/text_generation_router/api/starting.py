"""The application of a router that knows no shard yet: alive, not ready."""

from collections.abc import Callable

from aiohttp import web

from text_generation_router.api.http.dialects import dialect_of_path, error_response
from text_generation_router.discovery.source import UNABLE
from text_generation_router.errors import Unhealthy
from text_generation_router.metrics import CONTENT_TYPE
from text_generation_router.metrics.scheduler import no_replicas_text


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
