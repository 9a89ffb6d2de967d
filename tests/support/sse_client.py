"""Reading server-sent events in tests."""

from __future__ import annotations

from typing import Any

import aiohttp
import orjson

Json = dict[str, Any]


async def post(client: aiohttp.ClientSession, path: str, body: Json) -> Json:
    """Return the reply to a body; its status must be 200."""
    async with client.post(path, json=body) as response:
        assert response.status == 200, await response.text()
        reply: Json = await response.json()
        return reply


async def chunks(client: aiohttp.ClientSession, path: str, body: Json) -> list[Json]:
    """Return the chunks of an OpenAI stream, which must end in [DONE]."""
    async with client.post(path, json=body | {"stream": True}) as response:
        assert (response.status, response.content_type) == (200, "text/event-stream"), await response.text()
        events = [line async for line in response.content if line.startswith(b"data:")]
    assert events[-1] == b"data: [DONE]\n"
    return [orjson.loads(event.removeprefix(b"data: ")) for event in events[:-1]]
