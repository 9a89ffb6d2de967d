"""haystack with OpenAIChatGenerator, OpenAIResponsesChatGenerator and HuggingFaceAPIChatGenerator."""

from __future__ import annotations

import pytest
from endpoint import ANSWER, OPENAI_URL, QUESTION, URL, Capital, get_weather
from haystack.components.generators.chat import OpenAIChatGenerator, OpenAIResponsesChatGenerator
from haystack.dataclasses import ChatMessage, StreamingChunk
from haystack.tools import create_tool_from_function
from haystack.utils import Secret
from haystack_integrations.components.generators.huggingface_api import HuggingFaceAPIChatGenerator

MESSAGES = [ChatMessage.from_user(QUESTION)]
TOKEN = Secret.from_token("-")
OPENAI = {"model": "tgi", "api_base_url": OPENAI_URL, "api_key": TOKEN, "max_retries": 0}
CHAT = OpenAIChatGenerator(**OPENAI, generation_kwargs={"temperature": 0, "max_tokens": 40})
GENERATORS = [
    CHAT,
    OpenAIResponsesChatGenerator(**OPENAI, generation_kwargs={"temperature": 0, "max_output_tokens": 40}),
    HuggingFaceAPIChatGenerator(
        "text_generation_inference", {"url": URL}, TOKEN, {"temperature": 0.0, "max_tokens": 40}
    ),
]


@pytest.mark.parametrize("generator", GENERATORS, ids=lambda generator: type(generator).__name__)
def test_answer_and_stream(generator: object) -> None:
    chunks: list[StreamingChunk] = []
    assert generator.run(messages=MESSAGES)["replies"][0].text == ANSWER
    assert generator.run(messages=MESSAGES, streaming_callback=chunks.append)["replies"][0].text == ANSWER
    assert "".join(chunk.content for chunk in chunks) == ANSWER


@pytest.mark.parametrize("generator", GENERATORS, ids=lambda generator: type(generator).__name__)
def test_tools(generator: object) -> None:
    tool = create_tool_from_function(get_weather)
    reply = generator.run(messages=MESSAGES, tools=[tool], generation_kwargs={"tool_choice": "required"})["replies"][0]
    (call,) = reply.tool_calls
    assert call.tool_name == "get_weather"
    assert call.arguments["city"] in ("Paris", "London")


def test_structured_output() -> None:
    reply = CHAT.run(messages=MESSAGES, generation_kwargs={"response_format": Capital})["replies"][0]
    Capital.model_validate_json(reply.text)
