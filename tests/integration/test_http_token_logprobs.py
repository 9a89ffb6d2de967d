"""Log-probabilities of new tokens: which requests ask the engine for them (--token-logprobs), and what replies show.

An engine without those of the chosen tokens: every dialect returns null, in valid JSON.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checked_echo import CheckedEcho, RecordingEcho, recording
from every_dialect import VERBATIM, stream_data
from http_stack import LIMITS, Stack, serve, served
from sse_client import chunks, post

from text_generation_shard.engine import StepResult

pytestmark = pytest.mark.asyncio(loop_scope="module")

Json = dict[str, Any]
CHAT: Json = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
COMPLETION: Json = {"prompt": "Hello", "max_tokens": 2}


def tgi(**parameters: object) -> Json:
    return {"inputs": "Hello", "parameters": {"max_new_tokens": 2, **parameters}}


REQUESTS: list[tuple[str, Json, bool]] = [
    # (path, body, the reply shows them)
    ("/generate", tgi(), False),
    ("/generate", tgi(details=True), True),
    ("/generate", tgi(best_of=2, do_sample=True), True),
    ("/generate_stream", tgi(), True),
    ("/v1/chat/completions", CHAT, False),
    ("/v1/chat/completions", CHAT | {"stream": True}, False),
    ("/v1/chat/completions", CHAT | {"logprobs": True}, True),
    ("/v1/completions", COMPLETION | {"stream": True}, False),
    ("/v1/completions", COMPLETION | {"logprobs": 0}, True),
    ("/v1/messages", CHAT | {"model": "tgi"}, False),
]


async def answer(stack: Stack, path: str, body: Json) -> tuple[int, str, set[bool]]:
    """Return status and text of a response, and if the engine was asked for log-probabilities of new tokens."""
    assert isinstance(stack.engine, RecordingEcho)
    stack.engine.placements.clear()
    async with stack.client.post(path, json=body) as response:
        text = await response.text()
    return response.status, text, {each.logprobs.tokens for each in stack.engine.placements}


@pytest.mark.parametrize("always", [False, True], ids=["auto", "always"])
async def test_requests_that_ask_for_them(demo_model: Path, *, always: bool) -> None:
    limits = replace(LIMITS, always_logprobs=always)
    async with serve(demo_model, build=recording(), limits=limits, chat_template=VERBATIM) as stack:
        for path, body, shown in REQUESTS:
            status, text, asked = await answer(stack, path, body)
            assert (status, asked) == (200, {shown or always}), (path, body, text)
            assert ('"logprob":-' in text or '"token_logprobs":[-' in text) == (shown and "best_of" not in str(body))


async def test_an_engine_without_them(demo_model: Path) -> None:
    build = recording(unsupported=(("tokens", "no"), ("top_n", "no")))
    async with serve(demo_model, build=build, chat_template=VERBATIM) as stack:
        for path, body, shown in REQUESTS:
            status, text, asked = await answer(stack, path, body)
            assert True not in asked
            if shown and ("logprobs" in body or "best_of" in str(body)):
                assert status in (400, 422), (path, text)
                assert "is not supported by this engine: " in text
            else:
                assert status == 200, text
            if path == "/generate_stream":
                assert [event["token"]["logprob"] for event in stream_data(text.encode())] == [None, None]


class Forgetful(CheckedEcho):
    """Knows no log-probability of a chosen token; the last of the top tokens has a probability of 0."""

    def step(self) -> StepResult | None:
        result = super().step()
        if result is not None:
            result.logprobs = [math.nan] * len(result.logprobs)
            result.top_tokens = [replace(top, logprobs=(*top.logprobs[:-1], -math.inf)) for top in result.top_tokens]
        return result


stack = served(build=Forgetful.build, chat_template=VERBATIM)


async def test_tgis_replies_and_streams(stack: Stack) -> None:
    reply = await stack.generate("Hello there", max_new_tokens=3, details=True, top_n_tokens=2)
    assert [token["logprob"] for token in reply["details"]["tokens"]] == [None] * 3
    assert [[token["logprob"] for token in tops] for tops in reply["details"]["top_tokens"]] == [[-0.5, None]] * 3
    for tops in (0, 2):
        body = tgi(max_new_tokens=3, details=True, top_n_tokens=tops)
        events = stream_data((await stack.ask("/generate_stream", body)).body.encode())
        assert [event["token"]["logprob"] for event in events] == [None] * 3


async def test_of_several_sequences_one_is_still_the_best(stack: Stack) -> None:
    reply = await stack.generate("Hello", max_new_tokens=2, best_of=2, do_sample=True, details=True)
    assert [token["logprob"] for token in reply["details"]["tokens"]] == [None, None]
    assert len(reply["details"]["best_of_sequences"]) == 1


def unknown(content: list[Json]) -> list[tuple[float | None, list[float | None]]]:
    return [(token["logprob"], [other["logprob"] for other in token["top_logprobs"]]) for token in content]


async def test_chats(stack: Stack) -> None:
    """An unknown log-probability is null; that of a probability of 0 is OpenAI's -9999."""
    body = CHAT | {"logprobs": True, "top_logprobs": 2, "max_tokens": 3}
    [choice] = (await post(stack.client, "/v1/chat/completions", body))["choices"]
    expected = [(None, [-0.5, -9999.0])] * 3
    assert unknown(choice["logprobs"]["content"]) == expected
    stream = await chunks(stack.client, "/v1/chat/completions", body)
    told = [choice["logprobs"]["content"] for chunk in stream for choice in chunk["choices"] if choice["logprobs"]]
    assert [pair for content in told for pair in unknown(content)] == expected


async def test_completions(stack: Stack) -> None:
    body = {"prompt": "Hello there", "max_tokens": 2, "logprobs": 2}
    [choice] = (await post(stack.client, "/v1/completions", body))["choices"]
    assert choice["logprobs"]["token_logprobs"] == [None, None]
    assert [sorted(tops.values()) for tops in choice["logprobs"]["top_logprobs"]] == [[-9999.0, -0.5]] * 2
    stream = await chunks(stack.client, "/v1/completions", body)
    told = [choice["logprobs"] for chunk in stream for choice in chunk["choices"] if choice["logprobs"]]
    assert [logprob for columns in told for logprob in columns["token_logprobs"]] == [None, None]
    # Without alternatives only the chosen token is named.
    [choice] = (await post(stack.client, "/v1/completions", body | {"max_tokens": 1, "logprobs": 0}))["choices"]
    assert choice["logprobs"]["top_logprobs"] == [{"Hello": None}]
