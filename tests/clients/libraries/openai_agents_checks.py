"""openai-agents with its models for chat completions and Responses."""

from __future__ import annotations

import asyncio

import pytest
from agents import (
    Agent,
    MaxTurnsExceeded,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    ToolCallItem,
    function_tool,
    handoff,
    set_tracing_disabled,
)
from endpoint import ANSWER, OPENAI_URL, QUESTION, Capital, get_weather
from openai import AsyncOpenAI

set_tracing_disabled(True)
KINDS = [OpenAIChatCompletionsModel, OpenAIResponsesModel]
pytestmark = pytest.mark.parametrize("kind", KINDS)


def agent(kind: type, tool_choice: str | None = None, **options: object) -> Agent[None]:
    client = AsyncOpenAI(base_url=OPENAI_URL, api_key="-", max_retries=0)
    settings = ModelSettings(temperature=0, max_tokens=60, tool_choice=tool_choice)
    return Agent(name="a", model=kind("tgi", openai_client=client), model_settings=settings, **options)


def test_answer(kind: type) -> None:
    assert asyncio.run(Runner.run(agent(kind), QUESTION)).final_output == ANSWER


def test_a_stream_with_a_handoff(kind: type) -> None:
    async def streamed() -> object:
        first = agent(kind, tool_choice="required", handoffs=[handoff(agent(kind))])
        run = Runner.run_streamed(first, QUESTION)
        events = [event async for event in run.stream_events()]
        assert len(events) > 10
        return run.last_agent is not first and run.final_output

    assert asyncio.run(streamed())


def test_a_tool(kind: type) -> None:
    caller = agent(
        kind, tool_choice="required", tools=[function_tool(get_weather)], tool_use_behavior="stop_on_first_tool"
    )
    assert str(asyncio.run(Runner.run(caller, QUESTION)).final_output).startswith("It is sunny in ")


def test_structured_output(kind: type) -> None:
    assert isinstance(asyncio.run(Runner.run(agent(kind, output_type=Capital), QUESTION)).final_output, Capital)


def test_tools_with_structured_output(kind: type) -> None:
    """The first answer is a call or has the schema."""
    caller = agent(kind, tools=[function_tool(get_weather)], output_type=Capital)
    try:
        assert isinstance(asyncio.run(Runner.run(caller, QUESTION, max_turns=1)).final_output, Capital)
    except MaxTurnsExceeded as ended:
        assert any(isinstance(item, ToolCallItem) for item in ended.run_data.new_items)
    answerer = agent(kind, tool_choice="none", tools=[function_tool(get_weather)], output_type=Capital)
    assert isinstance(asyncio.run(Runner.run(answerer, QUESTION)).final_output, Capital)
