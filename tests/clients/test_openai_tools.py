"""The openai Python client: tools."""

from __future__ import annotations

import json
from typing import Any, Literal

import jsonschema
import pytest
from client_server import MESSAGES, PLACE, WEATHER
from openai import OpenAI, pydantic_function_tool
from openai.types.chat import ChatCompletionMessageFunctionToolCall
from pydantic import BaseModel

pytestmark = [pytest.mark.system, pytest.mark.model]

GREEDY: dict[str, Any] = {"model": "tgi", "messages": MESSAGES, "temperature": 0, "max_tokens": 40}


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Paris", "London"]


def test_required_call(openai_client: OpenAI) -> None:
    reply = openai_client.chat.completions.create(**GREEDY, tools=[WEATHER], tool_choice="required")
    (choice,) = reply.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    (call,) = choice.message.tool_calls or []
    assert isinstance(call, ChatCompletionMessageFunctionToolCall)
    assert call.id.startswith("call_")
    assert call.function.name == "get_weather"
    jsonschema.validate(json.loads(call.function.arguments), PLACE)


def test_a_streamed_call(openai_client: OpenAI) -> None:
    """Index, id and name arrive first and once, then the arguments in parts, then the finish reason."""
    stream = openai_client.chat.completions.create(**GREEDY, tools=[WEATHER], tool_choice="required", stream=True)
    choices = [choice for chunk in stream for choice in chunk.choices]
    assert not any(choice.delta.content for choice in choices)
    deltas = [delta for choice in choices for delta in choice.delta.tool_calls or []]
    first, *rest = deltas
    assert first.index == 0
    assert first.id is not None
    assert first.function is not None
    assert (first.type, first.function.name, first.function.arguments) == ("function", "get_weather", "")
    assert len(rest) > 1
    assert all(delta.index == 0 and delta.id is None and delta.function and not delta.function.name for delta in rest)
    arguments = "".join(delta.function.arguments or "" for delta in rest if delta.function)
    jsonschema.validate(json.loads(arguments), PLACE)
    assert [choice.finish_reason for choice in choices] == [None] * (len(choices) - 1) + ["tool_calls"]


def test_parsed_arguments(openai_client: OpenAI) -> None:
    arguments: dict[str, Any] = {**GREEDY, "tools": [pydantic_function_tool(Weather)], "tool_choice": "required"}
    with openai_client.chat.completions.stream(**arguments) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        streamed = stream.get_final_completion()
    assert [event.name for event in done] == ["Weather"]
    for completion in (streamed, openai_client.chat.completions.parse(**arguments)):
        (call,) = completion.choices[0].message.tool_calls or []
        assert isinstance(call.function.parsed_arguments, Weather)
        assert completion.choices[0].finish_reason == "tool_calls"


def test_call_result_and_answer(openai_client: OpenAI) -> None:
    """The call and its result are sent back as the client's objects, and the model answers."""
    reply = openai_client.chat.completions.create(**GREEDY, tools=[WEATHER], tool_choice="required")
    message = reply.choices[0].message
    (call,) = message.tool_calls or []
    counts = []
    for sky in ("blue", "blue, and then " * 10):
        result = {"role": "tool", "tool_call_id": call.id, "content": sky}
        arguments = GREEDY | {"messages": [*MESSAGES, message, result], "max_tokens": 4}
        again = openai_client.chat.completions.create(**arguments, tools=[WEATHER], tool_choice="none")
        assert again.choices[0].message.content
        assert again.usage is not None
        counts.append(again.usage.prompt_tokens)
    assert counts[1] > counts[0] + 30  # the model reads the result
