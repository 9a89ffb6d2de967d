"""A route is one row of a table. The server and its OpenAPI document are both made from the table."""

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

from aiohttp import hdrs, web

from text_generation_router.api.http.dialects import DIALECT, ROUTE_DIALECTS, Dialect, dialect_of_path
from text_generation_router.error_attributes import Operation
from text_generation_router.errors import ServingError, UnknownRoute, error_classes
from text_generation_router.web.bodies import JSON, expect_continue
from text_generation_router.web.body_errors import BodyRejected

MAX_PATH = 128
"""Characters of the path that the error repeats."""
_ELSEWHERE = {
    "/embed": "Hugging Face's text-embeddings-inference serves embeddings",
    "/rerank": "Hugging Face's text-embeddings-inference serves rerankers",
    "/v1/responses/": "Responses are not stored",
    "/api/": "Ollama's routes are not served; OpenAI's are, below /v1",
}
"""Advice by a part of the path."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class Route:
    """A method and a path with their request, responses and errors.

    The first line of the handler's docstring is the summary of the route, after `GET /path: `; the rest describes it.
    """

    method: str
    path: str
    """In aiohttp's syntax: `/v1/models/{model:.+}`."""
    handler: Handler
    body: Any = None
    """The model of the request body, or a union of models; None: no body."""
    answer: Any = None
    """The type of the response body; None: empty."""
    events: Any = None
    """The type of the data of each server-sent event; None: the route does not stream."""
    tag: str = ""
    name: str = ""
    """Its operation id in the OpenAPI document, the name of a method in generated clients; default: the handler's name."""
    operations: Operation = Operation.NONE
    """From these follow the errors of the route."""
    content_type: str = JSON
    """Content type of the response."""
    speaks: tuple[Dialect, ...] = ()
    """Dialects of the responses, the default first. Empty: the dialect of the path."""
    probe: bool = False
    """Needs no key, and is answered as `always` says."""
    always: bool = False
    """Answered on the management port, beyond the limit of connections and while draining."""
    documented: bool = True
    """Listed in the OpenAPI document; False for the files of pages, and for what only a page reads."""
    public: bool = False
    """Needs no key: a page, which contains nothing of this server."""
    same_origin: bool = False
    """No page of another origin may read the response, also where CORS allows it."""

    @property
    def dialects(self) -> tuple[Dialect, ...]:
        return self.speaks or (dialect_of_path(self.path),)

    @property
    def errors(self) -> tuple[type[ServingError], ...]:
        """The errors of its operations and of its body; a missing key is not among them."""
        operations = self.operations if self.probe or self.always or self.public else self.operations | Operation.ANY
        return tuple(
            error
            for error in error_classes()
            if error.operations & operations or (self.body is not None and issubclass(error, BodyRejected))
        )


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


def add_routes(app: web.Application, table: Iterable[Route]) -> dict[web.AbstractRoute, Route]:
    """Serve the routes of `table`; return its rows by aiohttp's routes.

    Raises ValueError if two rows have the same method and path.
    """
    resources: dict[str, web.Resource] = {}
    seen: set[tuple[str, str]] = set()
    rows: dict[web.AbstractRoute, Route] = {}
    dialects = app[ROUTE_DIALECTS] = {}
    for route in table:
        if (route.method, route.path) in seen:
            raise ValueError(f"{route.method} {route.path} is served already")
        seen.add((route.method, route.path))
        if route.path not in resources:
            resources[route.path] = app.router.add_resource(route.path)
        methods = (hdrs.METH_GET, hdrs.METH_HEAD) if route.method == hdrs.METH_GET else (route.method,)
        for method in methods:
            added = resources[route.path].add_route(method, route.handler, expect_handler=expect_continue)
            dialects[added] = route.dialects
            rows[added] = route
    return rows
