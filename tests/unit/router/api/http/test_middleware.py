"""An internal error in a handler is logged, and answered without details or by closing the connection."""

from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import web
from api_settings import api_metrics
from structlog.testing import capture_logs

from text_generation_router.api.http.middleware import answering


async def broken(request: web.Request) -> web.StreamResponse:
    raise ZeroDivisionError("secret")


async def broken_midway(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    await response.write(b"half an answer")
    raise ZeroDivisionError("secret")


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    app = web.Application(middlewares=[answering(api_metrics())])
    app.router.add_get("/broken", broken)
    app.router.add_get("/midway", broken_midway)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with aiohttp.ClientSession(f"http://127.0.0.1:{runner.addresses[0][1]}") as client:
        yield client
    await runner.cleanup()


async def test_an_internal_error_is_a_500_without_details(client: aiohttp.ClientSession) -> None:
    with capture_logs() as records:
        async with client.get("/broken") as response:
            assert response.status == 500
            assert await response.text() == '{"error":"Incomplete generation","error_type":"incomplete_generation"}'
    assert records[0]["event"] == "request handler failed"
    assert isinstance(records[0]["exc_info"], ZeroDivisionError)
    assert records[1]["status"] == 500


async def test_an_internal_error_after_the_first_byte_closes_the_connection(client: aiohttp.ClientSession) -> None:
    with capture_logs() as records:
        async with client.get("/midway") as response:
            with pytest.raises(aiohttp.ClientPayloadError):
                await response.read()
    assert records[0]["event"] == "request handler failed"
