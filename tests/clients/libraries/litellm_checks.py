"""litellm, by each of its providers."""

from __future__ import annotations

import litellm
import pytest
from endpoint import ANSWER, OPENAI_URL, QUESTION, TOO_LONG, URL, Capital

MESSAGES = [{"role": "user", "content": QUESTION}]
ROUTES = {
    "openai": {"model": "openai/tgi", "api_base": OPENAI_URL, "api_key": "-"},
    "vllm": {"model": "hosted_vllm/tgi", "api_base": OPENAI_URL, "api_key": "-"},
    "huggingface": {"model": "huggingface/tgi", "api_base": OPENAI_URL, "api_key": "-"},
    "anthropic": {"model": "anthropic/tgi", "api_base": URL, "api_key": "-"},
}
GREEDY = {"messages": MESSAGES, "temperature": 0, "max_tokens": 40, "num_retries": 0}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": Capital.model_json_schema()}}


@pytest.mark.parametrize("route", ROUTES)
def test_chat_stream_and_tools(route: str) -> None:
    assert litellm.completion(**ROUTES[route], **GREEDY).choices[0].message.content == ANSWER
    stream = litellm.completion(**ROUTES[route], **GREEDY, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == ANSWER
    reply = litellm.completion(**ROUTES[route], **GREEDY, tools=[TOOL], tool_choice="required")
    (call,) = reply.choices[0].message.tool_calls
    Capital.model_validate_json(call.function.arguments)


@pytest.mark.parametrize("route", ["openai", "vllm"])
def test_structured_output(route: str) -> None:
    reply = litellm.completion(**ROUTES[route], **GREEDY, response_format=Capital)
    Capital.model_validate_json(reply.choices[0].message.content)


@pytest.mark.parametrize("route", ["openai", "vllm", "anthropic"])
def test_a_prompt_that_is_too_long(route: str) -> None:
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**ROUTES[route], **GREEDY | {"messages": [{"role": "user", "content": TOO_LONG}]})
