"""CORS headers and request ids on every response."""

from __future__ import annotations

from pathlib import Path

import pytest
from http_stack import Stack, serve, served
from structlog.testing import capture_logs

ORIGIN = "http://a.example"
KEYS = {"api_key": ["key"]}
BEARER = {"authorization": "Bearer key"}


pytestmark = pytest.mark.asyncio(loop_scope="module")


stack = served(settings=KEYS)


async def test_a_preflight_needs_no_key_and_allows_any_header(stack: Stack) -> None:
    asked = "authorization, content-type, x-stainless-os"
    headers = {"origin": ORIGIN, "access-control-request-method": "POST", "access-control-request-headers": asked}
    for path in ("/v1/chat/completions", "/generate", "/nowhere"):
        status, _, told = await stack.ask(path, headers=headers, method="OPTIONS")
        assert status == 200
        assert told["access-control-allow-origin"] == "*"
        assert told["access-control-allow-headers"] == asked
        assert told["access-control-allow-methods"] == "GET,POST,DELETE"
        assert told["access-control-max-age"] == "7200"
        assert "x-request-id" in told


async def test_a_preflight_without_headers_lists_the_usual_ones(stack: Stack) -> None:
    headers = {"origin": ORIGIN, "access-control-request-method": "GET"}
    allowed = (await stack.ask("/info", headers=headers, method="OPTIONS")).headers["access-control-allow-headers"]
    usual = {"authorization", "x-api-key", "content-type", "x-request-id", "anthropic-version", "traceparent"}
    assert usual <= {*allowed.split(",")}


async def test_a_browser_may_read_errors_and_our_headers(stack: Stack) -> None:
    for path, key, status in (("/info", BEARER, 200), ("/nowhere", BEARER, 404), ("/info", {}, 401)):
        got, _, told = await stack.ask(path, headers={"origin": ORIGIN, **key})
        assert (got, told["access-control-allow-origin"]) == (status, "*")
        exposed = told["access-control-expose-headers"].split(",")
        assert {"x-request-id", "request-id", "retry-after", "x-cached-tokens"} <= {*exposed}


async def test_other_origins_are_not_allowed(demo_model: Path) -> None:
    async with serve(demo_model, settings={"cors_allow_origin": (ORIGIN,)}) as stack:
        for origin, allowed in ((ORIGIN, ORIGIN), ("http://b.example", None), (None, None)):
            headers = {} if origin is None else {"origin": origin}
            told = (await stack.ask("/info", headers=headers)).headers
            assert (told.get("access-control-allow-origin"), told["vary"]) == (allowed, "origin")
            assert ("access-control-expose-headers" in told) == (allowed is not None)


async def test_every_response_has_the_request_id(stack: Stack) -> None:
    named = {"x-request-id": "mine-1"}
    body = {"inputs": "a", "parameters": {"max_new_tokens": 2}}
    for path, json, key, status in (
        ("/health", None, BEARER, 200),
        ("/nowhere", None, BEARER, 404),
        ("/generate", None, BEARER, 405),
        ("/generate", {}, BEARER, 422),
        ("/generate", body, BEARER, 200),
        ("/generate_stream", body, BEARER, 200),
        ("/generate", body, {}, 401),
    ):
        got, _, headers = await stack.ask(path, json, named | key)
        assert (got, headers.getall("x-request-id")) == (status, ["mine-1"])
    ids = [
        (await stack.ask("/health", headers=given)).headers["x-request-id"] for given in ({"x-request-id": "a b"}, {})
    ]
    assert len(ids[0]) == 32
    assert ids[0] != ids[1]


async def test_the_log_has_request_id_and_trace_id(stack: Stack) -> None:
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    headers = {"x-request-id": "mine-3", "traceparent": f"00-{trace}-00f067aa0ba902b7-01", **BEARER}
    with capture_logs() as records:
        few = {"inputs": "a", "parameters": {"max_new_tokens": 2}}
        assert (await stack.ask("/generate", few, headers)).status == 200
        assert (await stack.ask("/generate", {}, headers | {"traceparent": "00-0-0-0"})).status == 422
    first, second = (record for record in records if record["event"] == "request finished")
    assert (first["http_request_id"], first["trace_id"]) == ("mine-3", trace)
    assert "trace_id" not in second
