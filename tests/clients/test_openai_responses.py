"""The openai Python client: responses, streamed and not."""

from __future__ import annotations

import json
from typing import Any, Literal

import jsonschema
import pytest
from client_server import ANSWER, PLACE, QUESTION
from openai import OpenAI
from openai.types.responses import FunctionToolParam, ResponseFunctionToolCall
from pydantic import BaseModel

pytestmark = [pytest.mark.system, pytest.mark.model]

GREEDY: dict[str, Any] = {"model": "tgi", "input": QUESTION, "temperature": 0, "max_output_tokens": 40}
WEATHER: FunctionToolParam = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a city",
    "parameters": PLACE,
    "strict": True,
}


class City(BaseModel):
    """The schema of a parsed response."""

    city: Literal["Paris", "London"]


def test_instructions_and_messages(openai_client: OpenAI) -> None:
    """Three forms of one conversation give the same prompt."""
    system = "You are a helpful assistant."
    ways = [
        {"instructions": system},
        {"input": [{"role": "developer", "content": system}, {"role": "user", "content": QUESTION}]},
        {
            "instructions": system,
            "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": QUESTION}]}],
        },
    ]
    responses = [openai_client.responses.create(**GREEDY | way) for way in ways]
    assert {response.output_text for response in responses} == {ANSWER}
    assert len({response.usage.input_tokens for response in responses if response.usage}) == 1


def test_stream_helper(openai_client: OpenAI) -> None:
    with openai_client.responses.stream(**GREEDY) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(deltas) == final.output_text == ANSWER


def test_parse(openai_client: OpenAI) -> None:
    response = openai_client.responses.parse(**GREEDY, text_format=City)
    assert isinstance(response.output_parsed, City)
    with openai_client.responses.stream(**GREEDY, text_format=City) as stream:
        assert stream.get_final_response().output_parsed == response.output_parsed


def test_tools(openai_client: OpenAI) -> None:
    """The model calls a tool, then answers with its result."""
    response = openai_client.responses.create(**GREEDY, tools=[WEATHER], tool_choice="required")
    (call,) = response.output
    assert isinstance(call, ResponseFunctionToolCall)
    assert (response.status, call.name, call.status) == ("completed", "get_weather", "completed")
    jsonschema.validate(json.loads(call.arguments), PLACE)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "The sky is blue."}
    conversation = [{"role": "user", "content": QUESTION}, call, result]
    arguments = GREEDY | {"input": conversation, "max_output_tokens": 4}
    again = openai_client.responses.create(**arguments, tools=[WEATHER], tool_choice="none")
    assert again.output_text
