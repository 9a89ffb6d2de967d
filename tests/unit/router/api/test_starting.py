from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from text_generation_router.api.app import create_starting_app


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("/generate", lambda answer: answer["error"]),
        ("/v1/chat/completions", lambda answer: answer["error"]["message"]),
        ("/v1/messages", lambda answer: answer["error"]["message"]),
    ],
)
async def test_a_router_without_a_shard_lives_and_refuses_in_the_dialect_of_the_path(
    path: str, reason: Callable[[Any], str]
) -> None:
    async with TestClient(TestServer(create_starting_app(lambda: False))) as client:
        assert (await client.get("/health/live")).status == 200
        assert "text_generation_replicas_serving 0.0" in await (await client.get("/metrics")).text()
        response = await client.post(path, data=b"{}")
        assert (response.status, response.headers["Connection"], response.headers["Retry-After"]) == (503, "close", "5")
        assert reason(await response.json()) == "no shard has joined yet"
