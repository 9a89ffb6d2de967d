"""Bodies that cannot be read are refused in plain text, as TGI's web framework does."""

from __future__ import annotations

import asyncio
import gzip
import io
import itertools
import json
import re
import time
import zlib
from collections.abc import AsyncIterator
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path

import pytest
from http_stack import Stack, serve, served
from yarl import URL

from text_generation_router.web import body_reader

JSON = {"content-type": "application/json"}


pytestmark = pytest.mark.asyncio(loop_scope="module")


stack = served(settings={"payload_limit": 2_000_000})


VALID = b'{"inputs": "a", "parameters": {"max_new_tokens": 1}}'
PARSE = "Failed to parse the request body as JSON: "
READ = "Failed to deserialize the JSON body into the target type: "
BUFFER = "Failed to buffer the request body: "


def packed(encoding: str) -> dict[str, str]:
    return JSON | {"content-encoding": encoding}


@pytest.mark.parametrize(
    ("headers", "body", "status", "text"),
    [
        (JSON, b"", 400, PARSE),
        (JSON, b"{", 400, PARSE),
        (JSON, b'{"inputs": "\xff"}', 400, PARSE),
        (JSON, b'{"inputs": "\\ud800"}', 400, PARSE),
        (JSON, b'{"inputs": "a", "parameters": {"temperature": NaN}}', 400, PARSE),
        (JSON, b'{"inputs": "a", "parameters": {"temperature": 1e999}}', 400, PARSE),
        (JSON, b"[" * 100_000, 400, PARSE),
        (JSON, b"{}", 422, READ + "missing field `inputs`"),
        (JSON, b'{"inputs": 1}', 422, READ + "`inputs` must be a string. Given: an integer"),
        (JSON, b"[]", 422, READ),
        (JSON, b'{"inputs": "a", "parameters": null}', 422, READ),
        ({"content-type": "application/json; charset=utf-8"}, VALID, 200, ""),
        ({"content-type": "Application/JSON"}, VALID, 200, ""),
        ({"content-type": "application/x+json"}, VALID, 200, ""),
        (packed("gzip"), gzip.compress(VALID, mtime=0), 200, ""),
        (packed("deflate"), zlib.compress(VALID), 200, ""),
        (packed("deflate"), zlib.compress(VALID)[2:-4], 200, ""),
        (packed("gzip"), gzip.compress(b" " * 50_000_000, mtime=0), 413, BUFFER),
        (packed("gzip"), b"this is not gzip", 400, BUFFER),
        (packed("gzip"), gzip.compress(VALID, mtime=0)[:-9], 400, BUFFER),
        (packed("gzip"), gzip.compress(VALID, mtime=0) + gzip.compress(b" ", mtime=0), 400, BUFFER),
        (packed("deflate"), b"", 400, BUFFER),
        (packed("frog"), VALID, 415, "Expected request with `Content-Encoding` of"),
        (packed("gzip, frog"), VALID, 415, "Expected request with `Content-Encoding` of"),
        (packed("br"), VALID, 415, "Expected request with `Content-Encoding` of"),
    ],
)
async def test_an_unreadable_body_is_refused_in_plain_text(
    stack: Stack, headers: dict[str, str], body: bytes, status: int, text: str
) -> None:
    async with stack.client.post("/generate", data=body, headers=headers) as response:
        told = await response.text()
        assert response.status == status, told
        assert told.startswith(text)
        assert response.content_type == ("application/json" if status == 200 else "text/plain")


async def test_a_body_that_is_too_large_is_refused_and_the_client_sees_it(stack: Stack) -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b" " * 100_000

    text = f"{BUFFER}length limit exceeded. The limit of this server, --payload-limit, is 2000000 bytes"
    for data in (io.BytesIO(b" " * 10_000_000), endless()):
        async with stack.client.post("/generate", data=data, headers=JSON) as response:
            assert (response.status, await response.text()) == (413, text)
            assert response.headers["connection"] == "close"
    await stack.assert_empty()


async def test_a_client_that_expects_100_continue_is_refused_before_it_sends(stack: Stack) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.port)
    head = "POST /generate HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\nexpect: 100-continue\r\n"
    writer.write(f"{head}content-length: 1000000000\r\n\r\n".encode())
    assert (await reader.readline()).startswith(b"HTTP/1.1 413 ")
    writer.close()
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.port)
    writer.write(f"{head}content-length: 2\r\n\r\n".encode())
    assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(b"{}")
    assert (await reader.readline()).startswith(b"HTTP/1.1 422 ")
    writer.close()


async def test_unfinished_bodies_are_limited_in_all(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound does not grow with the largest body. The body that has stood still longest ends."""
    monkeypatch.setattr(body_reader, "MAX_UNFINISHED", 2_500_000)
    head = b"POST /generate HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: 1900000\r\n\r\n"
    both = [await asyncio.open_connection("127.0.0.1", stack.port) for _ in range(2)]
    async with asyncio.timeout(5), asyncio.TaskGroup() as tasks:  # sooner than a body is late
        for _, writer in both:
            writer.write(head + b" " * 1_500_000)
        lines = [tasks.create_task(reader.readline()) for reader, _ in both]
        (refused,), (kept,) = await asyncio.wait(lines, return_when=asyncio.FIRST_COMPLETED)
        assert refused.result().startswith(b"HTTP/1.1 408 ")
        both[lines.index(kept)][1].write(b" " * 400_000)
        assert (await kept).startswith(b"HTTP/1.1 400 ")
    for _, writer in both:
        writer.close()


async def test_a_conversation_of_an_agent_fits(demo_model: Path) -> None:
    """By default, also where a client escapes each character: such a body has six times as many bytes."""
    body = json.dumps({"messages": [{"role": "user", "content": "\u4e2d\u6587\u3002" * 333_334}]}).encode()
    assert len(body) > 6_000_000
    sent = {"data": io.BytesIO(body), "headers": JSON}
    async with serve(demo_model) as stack, stack.client.post("/v1/chat/completions", **sent) as response:
        assert (await response.json())["error"]["code"] == "context_length_exceeded"


async def test_no_more_of_a_compressed_body_is_decoded_than_is_accepted(stack: Stack) -> None:
    bombs = [zlib.compress(b" " * 100_000_000)] * 10
    before = time.process_time()
    zlib.decompress(bombs[0])
    one_s = time.process_time() - before  # about 0.1 s

    async def refused(bomb: bytes) -> int:
        headers = JSON | {"content-encoding": "deflate"}
        async with stack.client.post("/generate", data=bomb, headers=headers) as response:
            return response.status

    before = time.process_time()
    async with asyncio.TaskGroup() as group:
        posts = [group.create_task(refused(bomb)) for bomb in bombs]
    assert {post.result() for post in posts} == {413}
    await asyncio.sleep(0.5)  # aiohttp would go on decoding to find the end of the request
    assert time.process_time() - before < 5 * one_s


async def test_a_body_may_come_in_parts_of_any_size(stack: Stack) -> None:
    ids = [300 + number % 3000 for number in range(100_000)]
    body = io.BytesIO(json.dumps({"ids": ids}).encode())

    async def parts() -> AsyncIterator[bytes]:
        for size in itertools.cycle((1, 9_000, 100, 70_000, 5, 5)):
            if not (part := body.read(size)):
                return
            yield part
            await asyncio.sleep(0)

    async with stack.client.post("/detokenize", data=parts(), headers=JSON) as response:
        assert (await response.json())["text"] == stack.tokenizer.decode(ids)


@pytest.mark.parametrize(("coding", "status"), [("Chunked", 200), ("gzip, chunked", 400), ("identity, chunked", 400)])
async def test_a_body_in_another_transfer_coding_than_chunked_is_refused(
    stack: Stack, coding: str, status: int
) -> None:
    def post() -> tuple[int, str]:
        with closing(HTTPConnection("127.0.0.1", stack.port)) as connection:
            headers = JSON | {"transfer-encoding": coding}
            connection.request("POST", "/generate", [VALID], headers, encode_chunked=True)
            response = connection.getresponse()
            return response.status, response.read().decode()

    got, text = await asyncio.to_thread(post)
    assert (got, "`Transfer-Encoding`" in text) == (status, status == 400), text


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/nowhere", 404), ("GET", "/generate", 405), ("DELETE", "/", 405)]
)
async def test_unknown_routes_and_wrong_methods_say_so(stack: Stack, method: str, path: str, status: int) -> None:
    reply = await stack.ask(path, method=method)
    assert (reply.status, reply.body["error"].split()[0]) == (status, method)


@pytest.mark.parametrize(
    ("path", "dialect", "hint"),
    [
        ("/chat/completions", "openai", "This server has /v1/chat/completions. See /docs"),
        ("/v1/v1/chat/completions", "openai", "This server has /v1/chat/completions. See /docs"),
        ("/proxy/v1/chat/completions/", "openai", "This server has /v1/chat/completions. See /docs"),
        ("/v1/chat/completion", "openai", "This server has /v1/chat/completions. See /docs"),
        ("/completions", "openai", "This server has /v1/completions. See /docs"),
        ("/messages", "anthropic", "This server has /v1/messages. See /docs"),
        ("/v1/generate", "openai", "This server has /generate. See /docs"),
        ("/v1/embeddings", "openai", "text-embeddings-inference serves embeddings. See /docs"),
        ("/rerank", "tgi", "text-embeddings-inference serves rerankers. See /docs"),
        ("/api/chat", "tgi", "Ollama's routes are not served; OpenAI's are, below /v1. See /docs"),
        ("/api/generate", "tgi", "Ollama's routes are not served; OpenAI's are, below /v1. See /docs"),
        ("/v1/audio/speech", "openai", "POST /v1/audio/speech is not served. See /docs"),
        ("/no%0Aroute%1b", "tgi", "POST /no%0Aroute%1b is not served. See /docs"),
    ],
)
async def test_an_unknown_route_names_the_one_that_was_meant(stack: Stack, path: str, dialect: str, hint: str) -> None:
    async with stack.client.post(URL(path, encoded=True), json={}) as response:
        reply = await response.json()
        assert response.status == 404
    error = reply["error"]
    text, found = (
        (error, "tgi") if isinstance(error, str) else (error["message"], "openai" if "param" in error else "anthropic")
    )
    assert found == dialect
    assert text.endswith(hint)


@pytest.mark.parametrize(("accept", "body"), [("*/*", False), ("text/html,application/xml;q=0.9,*/*;q=0.8", True)])
async def test_a_browser_finds_dashboard_and_documents_at_the_root(stack: Stack, accept: str, body: bool) -> None:
    status, text, _ = await stack.ask("/", headers={"accept": accept})
    links = re.findall(r'href="(\w+)"', text)
    assert (status, links) == (200, ["dashboard", "docs", "info", "metrics"] if body else [])
    assert all([(await stack.ask(f"/{link}")).status == 200 for link in links])


@pytest.mark.parametrize(
    "bytes_sent",
    [
        b"GET /\x1b[2Jpath HTTP/1.1\r\nhost: path\r\n\r\n",
        b"path path path\r\n\r\n",
        b"GET /path HTTP/1.1\r\npath : a\r\n\r\n",
        b"POST /path HTTP/1.1\r\nhost: path\r\ncontent-length: -1\r\n\r\n",
    ],
)
async def test_malformed_http_gets_a_400_without_its_bytes(stack: Stack, bytes_sent: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.port)
    writer.write(bytes_sent)
    assert await reader.read() == b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
    writer.close()
