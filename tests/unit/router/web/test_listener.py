"""The addresses at which the server listens, over real sockets."""

from __future__ import annotations

import socket

import aiohttp
import pytest
from aiohttp import web

from text_generation_proto.addresses import join_host_port, plain_ip
from text_generation_router.metrics.connections import ConnectionMetrics
from text_generation_router.metrics.instruments import Registry
from text_generation_router.web.connection_limits import ConnectionLimits
from text_generation_router.web.listener import HttpServer


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
@pytest.mark.parametrize(
    ("host", "reached"),
    [("::", ["127.0.0.1", "::1"]), ("::1", ["::1"]), ("127.0.0.1", ["127.0.0.1"]), ("0.0.0.0", ["127.0.0.1"])],
)
async def test_an_address_of_ipv6_that_means_all_includes_those_of_ipv4(host: str, reached: list[str]) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(text=plain_ip(request.remote or ""))

    app = web.Application()
    app.router.add_get("/", answer)
    server = HttpServer(app, ConnectionLimits(), ConnectionMetrics(Registry()))
    await server.listen(host, 0)
    found = []
    try:
        async with aiohttp.ClientSession() as session:
            for address in ("127.0.0.1", "::1"):
                try:
                    async with session.get(f"http://{join_host_port(address, server.port)}/") as response:
                        found.append(await response.text())
                except aiohttp.ClientConnectorError:
                    continue
    finally:
        await server.close()
    assert found == reached
