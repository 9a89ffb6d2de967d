"""llama-index with TextGenerationInference, which reads /info and needs a role in each delta of a stream."""

from __future__ import annotations

import asyncio
import json

from endpoint import ANSWER, PROMPT, QUESTION, URL, get_weather
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.text_generation_inference import TextGenerationInference

MODEL = TextGenerationInference(model_url=URL, token=None, max_tokens=40, temperature=0.01)
MESSAGES = [ChatMessage(role="user", content=QUESTION)]


def test_info_is_that_of_a_version_with_function_calling() -> None:
    assert MODEL.metadata.is_function_calling_model
    assert MODEL.metadata.context_window == 2048


def test_completion() -> None:
    assert MODEL.complete(PROMPT).text.strip() == ANSWER


def test_chat_and_stream() -> None:
    """The stream is asynchronous: others of this library take [DONE] for JSON, also from TGI."""

    async def streamed() -> list[str]:
        return [part.delta or "" async for part in await MODEL.astream_chat(MESSAGES)]

    assert MODEL.chat(MESSAGES).message.content == ANSWER
    deltas = asyncio.run(streamed())
    assert "".join(deltas) == ANSWER
    assert len(deltas) > 5


def test_tools() -> None:
    tool = FunctionTool.from_defaults(get_weather)
    answer = MODEL.chat_with_tools([tool], QUESTION, tool_choice="get_weather")
    (call,) = answer.message.additional_kwargs["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"])["city"] in ("Paris", "London")
