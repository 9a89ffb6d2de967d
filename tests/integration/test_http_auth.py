"""Without a valid key only the probes answer; no body is read, and unknown routes answer 401."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
from http_stack import Stack, serve, served
from structlog.testing import capture_logs

KEY = "sk-Secret-1"
BEARER = {"authorization": f"Bearer {KEY}"}


pytestmark = pytest.mark.asyncio(loop_scope="module")


stack = served(settings={"api_key": [KEY, "sk-other"]})


async def ask(stack: Stack, head: str) -> tuple[int, bytes]:
    """Status and bytes of the response to a raw request."""
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.port)
    writer.write(f"{head}\r\nhost: a\r\nconnection: close\r\n\r\n".encode())
    answer = await reader.read()
    writer.close()
    return int(answer.split()[1]), answer


async def test_every_route_but_the_probes_needs_a_key(stack: Stack) -> None:
    async with stack.client.get("/api-doc/openapi.json", headers=BEARER) as response:
        paths = (await response.json())["paths"]
    probes = set()
    for path, methods in paths.items():
        for method in methods:
            async with stack.client.request(method, re.sub("[{}]", "", path), data=b"{") as response:
                if response.status == 401:
                    assert response.headers["www-authenticate"] == "Bearer"
                else:
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
    async with stack.client.get("/nowhere", headers=BEARER) as response:
        assert response.status == 404
    async with stack.client.get("/info", headers={"x-api-key": "sk-other"}) as response:
        assert response.status == 200
    async with stack.client.get("/info", headers={"x-api-key": "SK-other"}) as response:
        assert response.status == 401


async def test_a_refusal_uses_the_dialect_of_the_route(stack: Stack) -> None:
    async with stack.client.post("/generate", json={"inputs": "a"}) as response:
        assert (response.status, await response.read()) == (401, b"")
    async with stack.client.post("/v1/chat/completions", json={}) as response:
        assert response.status == 401
        assert (await response.json())["error"]["code"] == "invalid_api_key"
    async with stack.client.post("/v1/messages", json={}) as response:
        assert response.status == 401
        assert (await response.json())["error"]["type"] == "authentication_error"


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
        async with stack.client.get("/info", headers={"authorization": "Bearer sk-wrong", "x-api-key": "no"}) as one:
            text = f"{await one.text()} {one.headers}"
        async with stack.client.post("/generate", json={"inputs": "a"}, headers=BEARER) as two:
            text += f"{await two.text()} {two.headers}"
    assert records
    assert not any(key in text + str(records) for key in (KEY, "sk-other", "sk-wrong"))


async def test_routes_named_by_vertex_ai_require_keys_like_the_others(demo_model: Path) -> None:
    settings = {"api_key": [KEY], "aip_predict_route": "/v1/e:predict", "aip_health_route": "/v1/e"}
    async with serve(demo_model, settings=settings) as stack:
        async with stack.client.post("/v1/e:predict", json={"instances": []}) as response:
            assert (response.status, await response.read()) == (401, b"")
        async with stack.client.get("/v1/e") as response:
            assert response.status == 200


async def test_a_key_above_its_rate_is_refused_with_a_wait(demo_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(f"""[[keys]]\nkey = "{KEY}"\ntokens_per_minute = 60\n[[keys]]\nkey = "other"\n""")
    async with serve(demo_model, settings={"api_keys_file": str(file)}) as stack:
        body = {"prompt": "one two three", "max_tokens": 90, "ignore_eos": True}
        async with stack.client.post("/v1/completions", json=body, headers=BEARER) as response:
            usage = (await response.json())["usage"]
        assert usage["total_tokens"] > 90
        async with stack.client.post("/v1/completions", json=body, headers=BEARER) as response:
            error = (await response.json())["error"]
            assert (response.status, error["code"]) == (429, "rate_limit_exceeded")
            assert abs(int(response.headers["retry-after"]) - (usage["total_tokens"] - 59)) <= 2
        async with stack.client.post("/v1/completions", json=body, headers={"x-api-key": "other"}) as response:
            assert response.status == 200
