"""smolagents with OpenAIServerModel and InferenceClientModel."""

from __future__ import annotations

import pytest
from endpoint import ANSWER, OPENAI_URL, QUESTION, URL, get_weather
from smolagents import ChatMessage, InferenceClientModel, Model, OpenAIServerModel, ToolCallingAgent, tool

MESSAGES = [ChatMessage(role="user", content=[{"type": "text", "text": QUESTION}])]
OPTIONS = {"temperature": 0, "max_tokens": 60}


@pytest.fixture(params=["openai", "huggingface"])
def model(request: pytest.FixtureRequest) -> Model:
    if request.param == "openai":
        return OpenAIServerModel("tgi", api_base=OPENAI_URL, api_key="-", **OPTIONS)
    return InferenceClientModel(URL, token="-", **OPTIONS)


def test_answer_and_stream(model: Model) -> None:
    assert model.generate(MESSAGES).content == ANSWER
    assert "".join(delta.content or "" for delta in model.generate_stream(MESSAGES)) == ANSWER


def test_an_agent_calls_a_tool(model: Model) -> None:
    """Each step of this agent requires a call."""
    agent = ToolCallingAgent(tools=[tool(get_weather)], model=model, max_steps=1, verbosity_level=0)
    agent.run(QUESTION)
    calls = [call for step in agent.memory.steps for call in getattr(step, "tool_calls", None) or []]
    assert calls
    assert {call.name for call in calls} <= {"get_weather", "final_answer"}
