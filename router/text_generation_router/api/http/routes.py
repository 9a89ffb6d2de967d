"""What a route is: one line, from which both the server and its OpenAPI document are made, so that they cannot differ."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

from aiohttp import hdrs, web

from text_generation_router.api.http.bodies import expect_continue
from text_generation_router.api.http.dialects import ROUTE_DIALECTS, Dialect, dialect_of_path
from text_generation_router.errors import (
    DeadlineExceeded,
    Draining,
    GenerationFailed,
    IncompleteGeneration,
    InvalidRequest,
    Overloaded,
    ServingError,
    Unhealthy,
)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

GENERATING: tuple[type[ServingError], ...] = (
    InvalidRequest,
    GenerationFailed,
    Overloaded,
    IncompleteGeneration,
    Draining,
    Unhealthy,
    DeadlineExceeded,
)
"""How a generation can fail."""

JSON = "application/json"


@dataclass(frozen=True, slots=True)
class Route:
    """A method, a path, what it takes and every way it answers.

    The first line of the handler's docstring is the route's summary: what stands after `GET /path: `.
    """

    method: str
    path: str
    """As aiohttp writes it: `/v1/models/{model:.+}`."""
    handler: Handler
    tag: str = ""
    body: Any = None
    """The model that checks the body, or a union of them; None: the route takes none."""
    answer: Any = None
    """Describes the good answer: a pydantic model, or a type made of them. None: it is empty."""
    content_type: str = JSON
    """Of the good answer; `answer` is then its text."""
    events: Any = None
    """Describes the data of each server-sent event, where the route can stream."""
    raises: tuple[type[ServingError], ...] = ()
    """What else it answers, beside what its body and its key can be refused for."""
    speaks: tuple[Dialect, ...] = ()
    """The dialects its failures are told in, the first one unless the handler says otherwise; none: that of its path."""
    probe: bool = False
    """Answers without a key."""
    documented: bool = True
    """Whether the OpenAPI document has it: what only a page of ours loads is left out."""

    @property
    def dialects(self) -> tuple[Dialect, ...]:
        """Whose words it speaks."""
        return self.speaks or (dialect_of_path(self.path),)

    @property
    def always_streams(self) -> bool:
        """Whether it has no other good answer than events."""
        return self.events is not None and self.answer is None


def add_routes(app: web.Application, table: Iterable[Route]) -> frozenset[web.AbstractRoute]:
    """Serve the table; returns the probes. Raises ValueError where two routes are the same."""
    resources: dict[str, web.Resource] = {}
    seen: set[tuple[str, str]] = set()
    probes: set[web.AbstractRoute] = set()
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
            if route.speaks:
                dialects[added] = route.speaks[0]
            if route.probe:
                probes.add(added)
    return frozenset(probes)
