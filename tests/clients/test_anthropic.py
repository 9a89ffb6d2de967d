"""The anthropic Python client: messages, streamed and not, and error types."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import jsonschema
import pytest
from anthropic import Anthropic
from anthropic.types import ToolChoiceToolParam, ToolParam, Usage
from client_server import ANSWER, ANSWER_TOKENS, MESSAGES, PLACE, PROMPT, Server

pytestmark = [pytest.mark.system, pytest.mark.model]

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


def test_models(client: Anthropic, server: Server) -> None:
    folder = Path(server.model)
    model, by_path = client.models.list(limit=1)
    assert (model.id, model.type, model.display_name) == (folder.name, "model", folder.name)
    assert by_path.id == server.model
    assert client.models.retrieve(folder.name) == model
    assert int(model.created_at.timestamp()) == int((folder / "tokenizer.json").stat().st_mtime)
    with pytest.raises(
        anthropic.NotFoundError, match=f"`gpt-5` does not exist. This server has `{folder.name}`"
    ) as refused:
        client.models.retrieve("gpt-5")
    assert refused.value.type == "not_found_error"


def test_stop_sequences_of_an_agent(client: Anthropic) -> None:
    stops = [f"stop {number}" for number in range(16)]
    message = client.messages.create(**GREEDY, stop_sequences=[*stops[1:], "Paris"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "Paris")
    with pytest.raises(anthropic.BadRequestError, match="`stop_sequences` supports up to 16 stop sequences"):
        client.messages.create(**GREEDY, stop_sequences=[*stops, "Paris"])


def test_errors(client: Anthropic, server: Server) -> None:
    with pytest.raises(anthropic.BadRequestError) as refused:
        client.messages.create(**GREEDY | {"messages": []})
    assert (refused.value.type, refused.value.status_code) == ("invalid_request_error", 400)
    assert "`messages` cannot be empty" in str(refused.value)
    with server.full(), pytest.raises(anthropic.RateLimitError) as full:
        client.messages.create(**GREEDY)
    assert full.value.type == "rate_limit_error"
