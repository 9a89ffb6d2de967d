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
        async with stack.client.options(path, headers=headers) as response:
            assert response.status == 200
            assert response.headers["access-control-allow-origin"] == "*"
            assert response.headers["access-control-allow-headers"] == asked
            assert response.headers["access-control-allow-methods"] == "GET,POST,DELETE"
            assert response.headers["access-control-max-age"] == "7200"
            assert "x-request-id" in response.headers


async def test_a_preflight_without_headers_lists_the_usual_ones(stack: Stack) -> None:
    headers = {"origin": ORIGIN, "access-control-request-method": "GET"}
    async with stack.client.options("/info", headers=headers) as response:
        allowed = response.headers["access-control-allow-headers"].split(",")
    assert {"authorization", "x-api-key", "content-type", "x-request-id", "anthropic-version", "traceparent"} <= {
        *allowed
    }


async def test_a_browser_may_read_errors_and_our_headers(stack: Stack) -> None:
    for path, status in (("/info", 200), ("/nowhere", 404)):
        async with stack.client.get(path, headers={"origin": ORIGIN, **BEARER}) as response:
            assert response.status == status
            assert response.headers["access-control-allow-origin"] == "*"
            exposed = response.headers["access-control-expose-headers"].split(",")
            assert {"x-request-id", "request-id", "retry-after", "x-cached-tokens"} <= {*exposed}
    async with stack.client.get("/info", headers={"origin": ORIGIN}) as response:
        assert response.status == 401
        assert response.headers["access-control-allow-origin"] == "*"


async def test_other_origins_are_not_allowed(demo_model: Path) -> None:
    async with serve(demo_model, settings={"cors_allow_origin": (ORIGIN,)}) as stack:
        for origin, allowed in ((ORIGIN, ORIGIN), ("http://b.example", None), (None, None)):
            headers = {} if origin is None else {"origin": origin}
            async with stack.client.get("/info", headers=headers) as response:
                assert response.headers.get("access-control-allow-origin") == allowed
                assert response.headers["vary"] == "origin"
                assert ("access-control-expose-headers" in response.headers) == (allowed is not None)


async def test_every_response_has_the_request_id(stack: Stack) -> None:
    named = {"x-request-id": "mine-1", **BEARER}
    body = {"inputs": "a", "parameters": {"max_new_tokens": 2}}
    for method, path, json, status in (
        ("GET", "/health", None, 200),
        ("GET", "/nowhere", None, 404),
        ("GET", "/generate", None, 405),
        ("POST", "/generate", {}, 422),
        ("POST", "/generate", body, 200),
        ("POST", "/generate_stream", body, 200),
    ):
        async with stack.client.request(method, path, json=json, headers=named) as response:
            assert (response.status, response.headers.getall("x-request-id")) == (status, ["mine-1"])
    async with stack.client.post("/generate", json=body, headers={"x-request-id": "mine-2"}) as response:
        assert (response.status, response.headers["x-request-id"]) == (401, "mine-2")
    async with (
        stack.client.get("/health", headers={"x-request-id": "not fit"}) as one,
        stack.client.get("/health") as two,
    ):
        assert len(one.headers["x-request-id"]) == 32
        assert one.headers["x-request-id"] != two.headers["x-request-id"]


async def test_the_log_has_request_id_and_trace_id(stack: Stack) -> None:
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    headers = {"x-request-id": "mine-3", "traceparent": f"00-{trace}-00f067aa0ba902b7-01", **BEARER}
    with capture_logs() as records:
        async with stack.client.post("/generate", json={"inputs": "a"}, headers=headers) as response:
            assert response.status == 200
            await response.read()
        async with stack.client.post("/generate", json={}, headers=headers | {"traceparent": "00-0-0-0"}) as response:
            assert response.status == 422
    first, second = (record for record in records if record["event"] == "request finished")
    assert (first["http_request_id"], first["trace_id"]) == ("mine-3", trace)
    assert "trace_id" not in second
