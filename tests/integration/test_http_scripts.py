"""Over HTTP, in 20 scripts and emoji: streamed text joined is the text returned whole, is the ids decoded."""

from __future__ import annotations

import json
from typing import Any

import pytest
from corpus import CORPUS
from http_stack import Stack, served

pytestmark = pytest.mark.asyncio(loop_scope="module")


stack = served()


async def events(stack: Stack, inputs: str, parameters: dict[str, Any]) -> list[dict[str, Any]]:
    body = {"inputs": inputs, "parameters": parameters}
    async with stack.client.post("/generate_stream", json=body) as response:
        assert response.status == 200
        return [json.loads(line[5:]) async for line in response.content if line.startswith(b"data:")]


@pytest.mark.parametrize("script", CORPUS)
async def test_streamed_whole_and_decoded_text_agree(stack: Stack, script: str) -> None:
    text = CORPUS[script]
    ids = stack.tokenizer.encode(text, add_special_tokens=True).ids
    echoed = text * 3
    stops = [[], [text[-2:] + text[:2]], [text[len(text) // 2 :] + text], ["never seen"], [text[1], text[:3]]]
    for stop in stops:
        parameters = {"max_new_tokens": 3 * len(ids), "stop": stop, "details": True}
        streamed = await events(stack, text, parameters)
        whole = await stack.generate(text, **parameters)
        joined = "".join(event["token"]["text"] for event in streamed if not event["token"]["special"])
        assert joined == streamed[-1]["generated_text"] == whole["generated_text"]
        end = min((echoed.index(word) + len(word) for word in stop if word in echoed), default=None)
        assert joined == echoed[:end]
        reason = "length" if end is None or end == len(echoed) else "stop_sequence"
        assert whole["details"]["finish_reason"] == streamed[-1]["details"]["finish_reason"] == reason
        if end is None:
            assert [event["token"]["id"] for event in streamed] == ids * 3
