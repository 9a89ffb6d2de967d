"""The steps before every route: keys, CORS headers, request ids.

Without a valid key only the probes answer; no body is read, and unknown routes answer 401.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
from http_stack import Stack, serve, served
from structlog.testing import capture_logs

KEY = "sk-Secret-1"
BEARER = {"authorization": f"Bearer {KEY}"}
ORIGIN = "http://a.example"


pytestmark = pytest.mark.asyncio(loop_scope="module")


stack = served(settings={"api_key": [KEY, "sk-other"]})


async def ask(stack: Stack, head: str) -> tuple[int, bytes]:
    """Status and bytes of the response to a raw request."""
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.port)
    writer.write(f"{head}\r\nhost: a\r\nconnection: close\r\n\r\n".encode())
    answer = await reader.read()
    writer.close()
    return int(answer.split()[1]), answer


async def test_every_route_but_the_probes_needs_a_key_and_the_document_says_so(stack: Stack) -> None:
    document = (await stack.ask("/api-doc/openapi.json", headers=BEARER)).body
    assert set(document["components"]["securitySchemes"]) == {"bearer", "x-api-key"}
    assert document["security"] == [{"bearer": []}, {"x-api-key": []}]
    probes = set()
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            async with stack.client.request(method, re.sub("[{}]", "", path), data=b"{") as response:
                needs_key = response.status == 401
                assert response.headers.get("www-authenticate") == ("Bearer" if needs_key else None)
            assert ("401" in operation["responses"]) == (operation.get("security") != []) == needs_key
            if not needs_key:
                probes.add((method, path))
    health = ("/health", "/health/live", "/health/ready", "/v2/health/live", "/v2/health/ready")
    pages = ("/dashboard",)  # without anything of this server
    assert probes == {
        ("get", path) for path in ("/", "/ping", *health, *pages, "/v2/models/{name}/versions/{version}/ready")
    }


@pytest.mark.parametrize(
    "line",
    [
        "GET /nowhere",
        "GET //health",
        "GET //v1/models",
        "GET /v1/../info",
        "GET /health/../info",
        "GET /health/",
        "GET /health/%2e%2e/info",
        "GET /%69nfo",
        "GET /info?x=/health",
        "GET /info#/health",
        "GET http://a/info",
        "POST /health",
        "DELETE /",
        "OPTIONS /info",
        "OPTIONS *",
        "PATCH /info",
    ],
)
async def test_no_spelling_of_a_path_avoids_the_key(stack: Stack, line: str) -> None:
    status, _ = await ask(stack, f"{line} HTTP/1.1")
    assert status == 401


async def test_an_escaped_path_of_a_probe_needs_no_key(stack: Stack) -> None:
    assert (await ask(stack, "GET /%68ealth?x HTTP/1.1"))[0] == 200


async def test_with_a_key_an_unknown_route_is_404(stack: Stack) -> None:
    for path, headers, status in (
        ("/nowhere", BEARER, 404),
        ("/info", {"x-api-key": "sk-other"}, 200),
        ("/info", {"x-api-key": "SK-other"}, 401),
    ):
        assert (await stack.ask(path, headers=headers)).status == status


async def test_a_refusal_uses_the_dialect_of_the_route(stack: Stack) -> None:
    tgi, openai, anthropic = [await stack.ask(path, {}) for path in ("/generate", "/v1/completions", "/v1/messages")]
    assert (tgi.status, openai.status, anthropic.status) == (401, 401, 401)
    assert tgi.body == ""
    assert openai.body["error"]["code"] == "invalid_api_key"
    assert anthropic.body["error"]["type"] == "authentication_error"


async def test_the_body_is_not_requested(stack: Stack) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.port)
    head = "POST /generate HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: 2\r\n"
    writer.write(f"{head}expect: 100-continue\r\n\r\n".encode())
    answer = await reader.read()  # to the end: the connection is closed
    assert answer.startswith(b"HTTP/1.1 401 ")
    assert b"connection: close" in answer.lower()
    writer.close()


async def test_no_key_is_returned_or_logged(stack: Stack) -> None:
    with capture_logs() as records:
        one = await stack.ask("/info", headers={"authorization": "Bearer sk-wrong", "x-api-key": "no"})
        two = await stack.ask("/generate", {"inputs": "a"}, BEARER)
    assert records
    assert not any(key in f"{one} {two} {records}" for key in (KEY, "sk-other", "sk-wrong"))


async def test_routes_named_by_vertex_ai_require_keys_like_the_others(demo_model: Path) -> None:
    settings = {"api_key": [KEY], "aip_predict_route": "/v1/e:predict", "aip_health_route": "/v1/e"}
    async with serve(demo_model, chats=False, settings=settings) as stack:
        assert (await stack.ask("/v1/e:predict", {"instances": []}))[:2] == (401, "")
        assert (await stack.ask("/v1/e")).status == 200


async def test_a_key_above_its_rate_is_refused_with_a_wait(demo_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(f"""[[keys]]\nkey = "{KEY}"\ntokens_per_minute = 60\n[[keys]]\nkey = "other"\n""")
    async with serve(demo_model, chats=False, settings={"api_keys_file": str(file)}) as stack:
        body = {"prompt": "one two three", "max_tokens": 90, "ignore_eos": True}
        tokens = (await stack.ask("/v1/completions", body, BEARER)).body["usage"]["total_tokens"]
        assert tokens > 90
        refused = await stack.ask("/v1/completions", body, BEARER)
        assert (refused.status, refused.body["error"]["code"]) == (429, "rate_limit_exceeded")
        assert abs(int(refused.headers["retry-after"]) - (tokens - 59)) <= 2
        assert (await stack.ask("/v1/completions", body, {"x-api-key": "other"})).status == 200


async def test_a_preflight_needs_no_key_and_allows_any_header(stack: Stack) -> None:
    asked = "authorization, content-type, x-stainless-os"
    headers = {"origin": ORIGIN, "access-control-request-method": "POST", "access-control-request-headers": asked}
    for path in ("/v1/chat/completions", "/generate", "/nowhere"):
        status, _, told = await stack.ask(path, headers=headers, method="OPTIONS")
        assert status == 200
        assert told["access-control-allow-origin"] == "*"
        assert told["access-control-allow-headers"] == asked
        assert told["access-control-allow-methods"] == "GET,POST"
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
    async with serve(demo_model, chats=False, settings={"cors_allow_origin": (ORIGIN,)}) as stack:
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
