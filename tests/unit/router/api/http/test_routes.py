"""The server and its OpenAPI document are made from one table."""

from __future__ import annotations

from functools import partial

import pytest
from aiohttp import web
from pydantic import BaseModel

from text_generation_router.api.core.settings import Limits
from text_generation_router.api.document.openapi import document
from text_generation_router.api.document.rules import document_rules
from text_generation_router.api.http.bodies import Body
from text_generation_router.api.http.dialects import Dialect
from text_generation_router.api.http.routes import Route, add_routes
from text_generation_router.api.tgi.schemas import GenerateBody
from text_generation_router.error_attributes import Operation


class Question(Body):
    text: str


class Reply(BaseModel):
    text: str


async def handler(request: web.Request) -> web.StreamResponse:
    """POST /ask: an answer."""
    return web.Response()


ASK = Route(
    "POST",
    "/v1/ask/{name:.+}",
    handler,
    "Questions",
    body=Question,
    answer=Reply,
    operations=Operation.TOKENIZE | Operation.FIND,
)


def test_two_routes_cannot_have_the_same_path() -> None:
    with pytest.raises(ValueError, match="POST /a is served already"):
        add_routes(web.Application(), [Route("POST", "/a", handler), Route("GET", "/a", handler)] * 2)


def test_probes_answer_head_too() -> None:
    app = web.Application()
    rows = add_routes(app, [Route("GET", "/a", handler, probe=True), Route("POST", "/a", handler)])
    assert {route.method for route, row in rows.items() if row.probe} == {"GET", "HEAD"}
    assert {route.method for route in app.router.routes()} == {"GET", "HEAD", "POST"}


def test_tgi_refuses_bodies_in_plain_text_and_keys_without_a_body() -> None:
    route = Route("POST", "/ask", handler, "Questions", body=Question, operations=Operation.HEALTH)
    responses = document([route], "1", keys=True)["paths"]["/ask"]["post"]["responses"]
    assert set(responses["400"]["content"]) == set(responses["422"]["content"]) == {"text/plain"}
    assert set(responses["503"]["content"]) == {"application/json"}
    assert "content" not in responses["401"]
    assert "content" not in responses["200"]


def test_a_route_of_two_dialects_lists_the_errors_of_both() -> None:
    route = Route(
        "POST", "/ask", handler, "Questions", speaks=(Dialect.TGI, Dialect.OPENAI), operations=Operation.TOKENIZE
    )
    described = document([route], "1", keys=False)["paths"]["/ask"]["post"]["responses"]["429"]["content"]
    assert len(described["application/json"]["schema"]["anyOf"]) == 2


def test_validation_rules_are_in_the_schemas() -> None:
    limits = Limits(max_best_of=3, max_stop_sequences=4, max_top_n_tokens=5, max_input_tokens=10, max_total_tokens=20)
    route = Route("POST", "/generate", handler, "TGI", body=GenerateBody)
    rules = partial(document_rules, limits=limits, prompts=1, generations=1)
    schemas = document([route], "1", keys=False, rules=rules)["components"]["schemas"]
    properties = schemas["GenerateParameters"]["properties"]
    for name, rule in {
        "best_of": {"maximum": 3},
        "max_new_tokens": {"minimum": 1},
        "truncate": {"minimum": 1, "maximum": 10},
        "top_p": {"minimum": 1.2e-38, "maximum": 0.9999999},
    }.items():
        assert rule.items() <= properties[name].items()
    assert schemas["GenerateBody"]["properties"]["inputs"]["minLength"] == 1
