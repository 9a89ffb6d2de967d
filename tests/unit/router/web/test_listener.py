"""The addresses at which the server listens, and the end of a long answer, over real sockets."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import aiohttp
import orjson
import pytest
from aiohttp import web
from http_stack import answering

from text_generation_proto.addresses import join_host_port, plain_ip
from text_generation_router.web.bodies import json_parts_response


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
@pytest.mark.parametrize(
    ("host", "reached"),
    [("::", ["127.0.0.1", "::1"]), ("::1", ["::1"]), ("127.0.0.1", ["127.0.0.1"]), ("0.0.0.0", ["127.0.0.1"])],
)
async def test_an_address_of_ipv6_that_means_all_includes_those_of_ipv4(host: str, reached: list[str]) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(text=plain_ip(request.remote or ""))

    found = []
    async with answering(answer, host) as server, aiohttp.ClientSession() as session:
        for address in ("127.0.0.1", "::1"):
            try:
                async with session.get(f"http://{join_host_port(address, server.port)}/") as response:
                    found.append(await response.text())
            except aiohttp.ClientConnectorError:
                continue
    assert found == reached


async def test_a_kept_connection_of_http_1_0_ends_with_a_long_answer() -> None:
    """Its client cannot read chunks."""
    texts = ["x" * 1_000_000] * 3  # more than is written at once

    async def answer(request: web.Request) -> web.StreamResponse:
        async def parts() -> AsyncIterator[bytes]:
            yield b"["
            for index, text in enumerate(texts):
                yield b"," * (index > 0) + orjson.dumps(text)
            yield b"]"

        return await json_parts_response(request, parts(), {})

    async with answering(answer) as server, asyncio.timeout(10):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
        received = await reader.read()
        writer.close()
    assert orjson.loads(received.partition(b"\r\n\r\n")[2]) == texts
