"""Reading server-sent events in tests."""

from __future__ import annotations

from typing import Any

import aiohttp
import orjson

from text_generation_router.text.tokenizer import Tokenizer

Json = dict[str, Any]


def asking(tokenizer: Tokenizer, says: str, **fields: object) -> Json:
    """Return a chat that an echo engine, behind a template that writes the messages alone, answers with exactly `says`."""
    tokens = len(tokenizer.encode_ids(says, add_special_tokens=False))
    return {"messages": [{"role": "user", "content": says}], "max_tokens": tokens, "temperature": 0, **fields}


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


def joined(stream: list[Json], index: int = 0) -> Json:
    """Return one choice of a streamed chat: its text, reasoning, calls and finish reason."""
    message: Json = {"content": "", "reasoning_content": "", "tool_calls": []}
    finish = None
    for chunk in stream:
        for choice in chunk["choices"]:
            if choice["index"] != index:
                continue
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            message["reasoning_content"] += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls") or ():
                if "id" in call:
                    assert call["index"] == len(message["tool_calls"])
                    assert call["type"] == "function"
                    message["tool_calls"].append({"name": call["function"]["name"], "arguments": ""})
                message["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
            assert finish is None, "a choice ends once"
            finish = choice["finish_reason"]
    return message | {"finish_reason": finish}


def whole(reply: Json, index: int = 0) -> Json:
    """Return one choice of a whole chat, in the form of `joined`."""
    choice = reply["choices"][index]
    message = choice["message"]
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return {
        "content": message["content"] or "",
        "reasoning_content": message.get("reasoning_content", ""),
        "tool_calls": calls,
        "finish_reason": choice["finish_reason"],
    }
