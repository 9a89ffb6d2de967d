"""The error for a path that no route has. It names the route that was probably meant."""

from __future__ import annotations

from aiohttp import web

from text_generation_router.api.http.dialects import DIALECT, dialect_of_path
from text_generation_router.errors import UnknownRoute

MAX_PATH = 128
"""Characters of the path that the error repeats."""
_ELSEWHERE = {
    "/embed": "Hugging Face's text-embeddings-inference serves embeddings",
    "/rerank": "Hugging Face's text-embeddings-inference serves rerankers",
    "/api/": "Ollama's routes are not served; OpenAI's are, below /v1",
}
"""Advice by a part of the path."""


def unknown_route(request: web.Request) -> UnknownRoute:
    """Return the error for a request, and set its dialect to that of the route that was meant."""
    path = request.rel_url.raw_path
    meant = _meant(path.rstrip("/"), [resource.canonical for resource in request.app.router.resources()])
    advice = [text for part, text in _ELSEWHERE.items() if part in path]
    if meant is not None and (not advice or (meant.startswith("/v1/") and path.rstrip("/").endswith(meant))):
        advice = [f"This server has {meant}"]
        if not path.startswith("/v1/"):
            request[DIALECT] = dialect_of_path(meant)
    return UnknownRoute(". ".join([f"{request.method} {path[:MAX_PATH]} is not served", *advice[:1], "See /docs"]))


def _meant(path: str, known: list[str]) -> str | None:
    """Return the longest route that the path ends with, else the shortest that ends or begins with the path."""
    inner = [route for route in known if len(route) > 1 and path.endswith(route)]
    outer = [route for route in known if path and (route.endswith(path) or route.startswith(path))]
    return max(inner, key=len) if inner else min(outer, key=len, default=None)
