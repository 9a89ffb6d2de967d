"""The application of a router that knows no shard yet: alive, not ready."""

from __future__ import annotations

from aiohttp import web

from text_generation_router.api.http.dialects import dialect_of_path, error_response
from text_generation_router.errors import Unhealthy


def create_starting_app() -> web.Application:
    """Return an application that answers /health/live with 200, and everything else with 503."""

    async def live(request: web.Request) -> web.StreamResponse:
        return web.Response()

    async def refuse(request: web.Request) -> web.StreamResponse:
        response = error_response(dialect_of_path(request.path), Unhealthy("no shard has joined yet"))
        response.force_close()
        return response

    app = web.Application()
    app.router.add_get("/health/live", live)
    app.router.add_route("*", "/{path:.*}", refuse)
    return app
