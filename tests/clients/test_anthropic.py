"""The anthropic Python client: messages, streamed and not, and error types."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import jsonschema
import pytest
from anthropic import Anthropic, AsyncAnthropic
from anthropic.types import ToolChoiceToolParam, ToolParam, Usage
from client_server import ANSWER, ANSWER_TOKENS, PLACE, PROMPT, QUESTION, Server

pytestmark = [pytest.mark.system, pytest.mark.model]

MESSAGES = [{"role": "user", "content": QUESTION}]
GREEDY: dict[str, Any] = {
    "model": "tgi",
    "messages": MESSAGES,
    "max_tokens": 40,
    "extra_body": {"temperature": 0},  # which this version of the client has no argument for
}
WEATHER: ToolParam = {"name": "get_weather", "description": "The weather of a city", "input_schema": PLACE}


@pytest.fixture
def client(server: Server) -> Iterator[Anthropic]:
    """A client without retries, so that errors reach the test."""
    with Anthropic(base_url=server.url, api_key="-", max_retries=0) as client:
        yield client


def prompt_tokens(usage: Usage) -> int:
    """All prompt tokens: those read from the KV cache are a separate count."""
    return usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_a_message(client: Anthropic, server: Server) -> None:
    message = client.messages.create(**GREEDY)
    assert message.id.startswith("msg_")
    assert (message.type, message.role, message.stop_reason, message.stop_sequence) == (
        "message",
        "assistant",
        "end_turn",
        None,
    )
    (block,) = message.content
    assert (block.type, block.text) == ("text", ANSWER)
    assert (prompt_tokens(message.usage), message.usage.output_tokens) == (server.count(PROMPT), ANSWER_TOKENS)


def test_stop_reasons(client: Anthropic) -> None:
    cut = client.messages.create(**GREEDY | {"max_tokens": 3})
    assert (cut.content[0].type, cut.stop_reason) == ("text", "max_tokens")
    assert cut.content[0].text == "The capital of"
    stopped = client.messages.create(**GREEDY, stop_sequences=["France"])
    assert stopped.content[0].type == "text"
    assert stopped.content[0].text == "The capital of "
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "France")


def test_a_system_prompt_and_blocks(client: Anthropic, server: Server) -> None:
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"  # what the template says by default
    messages = [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}]
    for way in (system, [{"type": "text", "text": system}]):
        message = client.messages.create(**GREEDY | {"messages": messages}, system=way)
        assert message.content[0].type == "text"
        assert message.content[0].text == ANSWER
        assert prompt_tokens(message.usage) == server.count(PROMPT)


def test_events(client: Anthropic, server: Server) -> None:
    events = list(client.messages.create(**GREEDY, stream=True))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    start, ending = events[0], events[-2]
    assert start.type == "message_start"
    assert prompt_tokens(start.message.usage) == server.count(PROMPT)
    assert ending.type == "message_delta"
    assert (ending.delta.stop_reason, ending.usage.output_tokens) == ("end_turn", ANSWER_TOKENS)


def test_stream_helper(client: Anthropic) -> None:
    with client.messages.stream(**GREEDY) as stream:
        texts = list(stream.text_stream)
        final = stream.get_final_message()
    assert len(texts) > 1
    assert "".join(texts) == ANSWER
    assert final.content[0].type == "text"
    assert (final.content[0].text, final.usage.output_tokens) == (ANSWER, ANSWER_TOKENS)


def test_tools(client: Anthropic) -> None:
    """The model calls a tool, then answers with its result."""
    message = client.messages.create(**GREEDY, tools=[WEATHER], tool_choice={"type": "any"})
    (use,) = message.content
    assert use.type == "tool_use"
    assert (message.stop_reason, use.name) == ("tool_use", "get_weather")
    jsonschema.validate(use.input, PLACE)

    result = {"type": "tool_result", "tool_use_id": use.id, "content": "The sky is blue."}
    conversation = [*MESSAGES, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    arguments = GREEDY | {"messages": conversation, "max_tokens": 4}
    again = client.messages.create(**arguments, tools=[WEATHER], tool_choice={"type": "none"})
    assert again.content[0].type == "text"
    assert again.content[0].text


def test_streamed_tools(client: Anthropic) -> None:
    choice: ToolChoiceToolParam = {"type": "tool", "name": "get_weather"}
    with client.messages.stream(**GREEDY, tools=[WEATHER], tool_choice=choice) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        message = stream.get_final_message()
    (use,) = message.content
    assert use.type == "tool_use"
    assert (message.stop_reason, use.name) == ("tool_use", "get_weather")
    assert len(pieces) > 1
    assert json.loads("".join(pieces)) == use.input
    jsonschema.validate(use.input, PLACE)


def test_count_tokens(client: Anthropic, server: Server) -> None:
    counted = client.messages.count_tokens(model="tgi", messages=[{"role": "user", "content": QUESTION}])
    assert counted.input_tokens == server.count(PROMPT)


def test_errors(client: Anthropic, server: Server) -> None:
    with pytest.raises(anthropic.UnprocessableEntityError) as refused:
        client.messages.create(**GREEDY | {"messages": []})
    assert (refused.value.type, refused.value.status_code) == ("invalid_request_error", 422)
    assert "`messages` cannot be empty" in str(refused.value)
    with server.full(), pytest.raises(anthropic.RateLimitError) as full:
        client.messages.create(**GREEDY)
    assert full.value.type == "rate_limit_error"


async def test_async(server: Server) -> None:
    async with AsyncAnthropic(base_url=server.url, api_key="-", max_retries=0) as client:
        async with client.messages.stream(**GREEDY) as stream:
            assert "".join([text async for text in stream.text_stream]) == ANSWER
        message = await client.messages.create(**GREEDY)
        assert message.usage.output_tokens == ANSWER_TOKENS
