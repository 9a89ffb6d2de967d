"""pydantic-ai with its models for chat completions, Responses, Messages and huggingface_hub."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress

import pytest
from endpoint import ANSWER, OPENAI_URL, QUESTION, Capital, get_weather
from huggingface_hub import AsyncInferenceClient
from pydantic_ai import Agent, NativeOutput, ToolOutput, capture_run_messages
from pydantic_ai.exceptions import UsageLimitExceeded
from pydantic_ai.messages import ToolCallPart
from pydantic_ai.models import Model
from pydantic_ai.models.huggingface import HuggingFaceModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.huggingface import HuggingFaceProvider
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.usage import UsageLimits

SETTINGS = {"temperature": 0.0, "max_tokens": 40}
KINDS = {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel}


def model(kind: str) -> Model:
    if kind == "huggingface":
        client = AsyncInferenceClient(base_url=OPENAI_URL, api_key="-")
        return HuggingFaceModel("tgi", provider=HuggingFaceProvider(hf_client=client, api_key="-"))
    return KINDS[kind]("tgi", provider=OpenAIProvider(base_url=OPENAI_URL, api_key="-"))


@pytest.mark.parametrize("kind", [*KINDS, "huggingface"])
def test_answer_and_stream(kind: str) -> None:
    agent = Agent(model(kind), model_settings=SETTINGS)

    async def both() -> tuple[str, list[str]]:
        async with agent.run_stream(QUESTION) as answer:
            parts = [part async for part in answer.stream_text(delta=True, debounce_by=None)]
        return (await agent.run(QUESTION)).output, parts

    whole, parts = asyncio.run(both())
    assert (whole, "".join(parts)) == (ANSWER, ANSWER)
    assert len(parts) > 5


@pytest.mark.parametrize("output", [ToolOutput, NativeOutput])
@pytest.mark.parametrize("kind", KINDS)
def test_structured_output(kind: str, output: type) -> None:
    agent = Agent(model(kind), output_type=output(Capital), model_settings=SETTINGS)
    assert isinstance(agent.run_sync(QUESTION).output, Capital)


@pytest.mark.parametrize("kind", KINDS)
def test_tools_with_structured_output(kind: str) -> None:
    """The first answer is a call or has the schema."""
    agent = Agent(model(kind), output_type=NativeOutput(Capital), tools=[get_weather], model_settings=SETTINGS)
    with capture_run_messages() as messages, suppress(UsageLimitExceeded):
        agent.run_sync(QUESTION, usage_limits=UsageLimits(request_limit=1))
    parts = messages[1].parts
    assert parts
    for part in parts:
        Capital.model_validate(part.args_as_dict() if isinstance(part, ToolCallPart) else json.loads(part.content))
