"""A long JSON answer ends with the connection for a client of HTTP/1.0, which cannot read chunks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import orjson
from aiohttp import web

from text_generation_router.metrics.connections import ConnectionMetrics
from text_generation_router.metrics.instruments import Registry
from text_generation_router.web.bodies import json_parts_response
from text_generation_router.web.connection_limits import ConnectionLimits
from text_generation_router.web.listener import HttpServer

TEXTS = ["x" * 1_000_000] * 3
"""More than is written at once."""


async def answer(request: web.Request) -> web.StreamResponse:
    async def parts() -> AsyncIterator[bytes]:
        yield b"["
        for index, text in enumerate(TEXTS):
            yield b"," * (index > 0) + orjson.dumps(text)
        yield b"]"

    return await json_parts_response(request, parts(), {})


async def test_a_kept_connection_of_http_1_0_ends_with_a_long_answer() -> None:
    app = web.Application()
    app.router.add_get("/", answer)
    server = HttpServer(app, ConnectionLimits(), ConnectionMetrics(Registry()))
    await server.listen("127.0.0.1", 0)
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
        async with asyncio.timeout(10):
            received = await reader.read()
        writer.close()
    finally:
        await server.close()
    assert orjson.loads(received.partition(b"\r\n\r\n")[2]) == TEXTS
