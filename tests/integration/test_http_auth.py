"""Nobody without a key gets anything but the probes: not the body read, not even a 404."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from http_stack import Stack, serve
from structlog.testing import capture_logs

from text_generation_router.api.http.caller import ApiKeys

KEY = "sk-Secret-1"
BEARER = {"authorization": f"Bearer {KEY}"}


@pytest.fixture
async def stack(demo_model: Path) -> AsyncIterator[Stack]:
    async with serve(demo_model, settings={"api_keys": ApiKeys([KEY, "sk-other"])}) as stack:
        yield stack


async def ask(stack: Stack, head: str) -> tuple[int, bytes]:
    """Status and the whole answer to a request written by hand."""
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.port)
    writer.write(f"{head}\r\nhost: a\r\nconnection: close\r\n\r\n".encode())
    answer = await reader.read()
    writer.close()
    return int(answer.split()[1]), answer


@pytest.mark.parametrize("path", ["/", "/health", "/ping", "/v2/models/m/versions/1/ready"])
async def test_probes_need_no_key(stack: Stack, path: str) -> None:
    async with stack.client.get(path) as response:
        assert response.status == 200
    async with stack.client.head(path) as response:
        assert response.status == 200


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
    ready = "/v2/models/{name}/versions/{version}/ready"
    assert probes == {("get", path) for path in ("/", "/health", "/ping", "/v2/health/live", "/v2/health/ready", ready)}


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
async def test_no_way_of_writing_a_path_gets_around_the_key(stack: Stack, line: str) -> None:
    status, _ = await ask(stack, f"{line} HTTP/1.1")
    assert status == 401


async def test_a_probe_is_a_probe_however_it_is_written(stack: Stack) -> None:
    assert (await ask(stack, "GET /%68ealth?x HTTP/1.1"))[0] == 200


async def test_with_the_key_a_route_that_is_not_there_is_not_found(stack: Stack) -> None:
    async with stack.client.get("/nowhere", headers=BEARER) as response:
        assert response.status == 404
    async with stack.client.get("/info", headers={"x-api-key": "sk-other"}) as response:
        assert response.status == 200
    async with stack.client.get("/info", headers={"x-api-key": "SK-other"}) as response:
        assert response.status == 401


async def test_a_refusal_speaks_the_routes_dialect(stack: Stack) -> None:
    async with stack.client.post("/generate", json={"inputs": "a"}) as response:
        assert (response.status, await response.read()) == (401, b"")
    async with stack.client.post("/v1/chat/completions", json={}) as response:
        assert response.status == 401
        assert (await response.json())["error"]["code"] == "invalid_api_key"
    async with stack.client.post("/v1/messages", json={}) as response:
        assert response.status == 401
        assert (await response.json())["error"]["type"] == "authentication_error"


async def test_the_body_is_not_even_asked_for(stack: Stack) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.port)
    head = "POST /generate HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: 2\r\n"
    writer.write(f"{head}expect: 100-continue\r\n\r\n".encode())
    answer = await reader.read()  # to the end: the connection is closed
    assert answer.startswith(b"HTTP/1.1 401 ")
    assert b"connection: close" in answer.lower()
    writer.close()


async def test_no_key_is_ever_told_or_logged(stack: Stack) -> None:
    with capture_logs() as records:
        async with stack.client.get("/info", headers={"authorization": "Bearer sk-wrong", "x-api-key": "no"}) as one:
            text = f"{await one.text()} {one.headers}"
        async with stack.client.post("/generate", json={"inputs": "a"}, headers=BEARER) as two:
            text += f"{await two.text()} {two.headers}"
    assert records
    assert not any(key in text + str(records) for key in (KEY, "sk-other", "sk-wrong"))


async def test_without_keys_everybody_is_let_in(demo_model: Path) -> None:
    async with serve(demo_model) as stack, stack.client.get("/info") as response:
        assert response.status == 200


async def test_a_route_the_platform_names_is_refused_as_its_twin(demo_model: Path) -> None:
    settings = {
        "api_keys": ApiKeys([KEY]),
        "vertex_predict_routes": ("/v1/e:predict",),
        "vertex_health_routes": ("/v1/e",),
    }
    async with serve(demo_model, settings=settings) as stack:
        async with stack.client.post("/v1/e:predict", json={"instances": []}) as response:
            assert (response.status, await response.read()) == (401, b"")
        async with stack.client.get("/v1/e") as response:
            assert response.status == 200
