"""The server and its OpenAPI document are made from one table."""

from __future__ import annotations

import pytest
from aiohttp import web

from text_generation_router.api.document.openapi import document
from text_generation_router.api.http.dialects import Dialect
from text_generation_router.api.http.routes import Route, add_routes
from text_generation_router.api.openai.schemas import ChatBody
from text_generation_router.api.tgi.schemas import GenerateBody
from text_generation_router.error_attributes import Operation
from text_generation_router.web.bodies import Body


class Question(Body):
    text: str


async def handler(request: web.Request) -> web.StreamResponse:
    """POST /ask: an answer."""
    return web.Response()


def test_two_routes_cannot_have_the_same_path() -> None:
    with pytest.raises(ValueError, match="POST /a is served already"):
        add_routes(web.Application(), [Route("POST", "/a", handler), Route("GET", "/a", handler)] * 2)


def test_probes_answer_head_too() -> None:
    app = web.Application()
    rows = add_routes(app, [Route("GET", "/a", handler, probe=True), Route("POST", "/a", handler)])
    assert {route.method for route, row in rows.items() if row.probe} == {"GET", "HEAD"}
    assert {route.method for route in app.router.routes()} == {"GET", "HEAD", "POST"}


def test_tgi_refuses_bodies_in_plain_text_and_keys_without_a_body() -> None:
    route = Route("POST", "/ask", handler, tag="Questions", body=Question, operations=Operation.HEALTH)
    responses = document([route], "1", keys=True)["paths"]["/ask"]["post"]["responses"]
    assert set(responses["400"]["content"]) == set(responses["422"]["content"]) == {"text/plain"}
    assert set(responses["503"]["content"]) == {"application/json"}
    assert "content" not in responses["401"]
    assert "content" not in responses["200"]


def test_a_route_of_two_dialects_lists_the_errors_of_both() -> None:
    route = Route(
        "POST", "/ask", handler, tag="Questions", speaks=(Dialect.TGI, Dialect.OPENAI), operations=Operation.TOKENIZE
    )
    described = document([route], "1", keys=False)["paths"]["/ask"]["post"]["responses"]["429"]["content"]
    assert len(described["application/json"]["schema"]["anyOf"]) == 2


def test_ranges_are_those_of_the_dialect() -> None:
    routes = [Route("POST", f"/{body.__name__}", handler, body, tag="TGI") for body in (GenerateBody, ChatBody)]
    schemas = document(routes, "1", keys=False)["components"]["schemas"]
    top_p = {name: schemas[name]["properties"]["top_p"] for name in ("GenerateParameters", "ChatBody")}
    assert {"exclusiveMinimum": 0, "exclusiveMaximum": 1}.items() <= top_p["GenerateParameters"].items()
    assert {"minimum": 0, "maximum": 1}.items() <= top_p["ChatBody"].items()
