"""llama-index with OpenAILike."""

from __future__ import annotations

from endpoint import ANSWER, OPENAI_URL, PROMPT, QUESTION, Capital, get_weather
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

OPTIONS = {
    "model": "tgi",
    "api_base": OPENAI_URL,
    "api_key": "-",
    "temperature": 0,
    "max_tokens": 40,
    "max_retries": 0,
    "is_function_calling_model": True,
}
CHAT = OpenAILike(is_chat_model=True, should_use_structured_outputs=True, **OPTIONS)
MESSAGES = [ChatMessage(role="user", content=QUESTION)]


def test_chat_and_stream() -> None:
    assert CHAT.chat(MESSAGES).message.content == ANSWER
    *_, last = CHAT.stream_chat(MESSAGES)
    assert last.message.content == ANSWER


def test_completion_and_stream() -> None:
    model = OpenAILike(is_chat_model=False, logprobs=True, **OPTIONS)
    answer = model.complete(PROMPT)
    assert answer.text == ANSWER
    assert "".join(token.token for (token, *_) in answer.logprobs or []).startswith(ANSWER)
    *_, last = model.stream_complete(PROMPT)
    assert last.text == ANSWER


def test_tools() -> None:
    tool = FunctionTool.from_defaults(get_weather)
    answer = CHAT.chat_with_tools([tool], QUESTION, tool_required=True)
    (call,) = CHAT.get_tool_calls_from_response(answer)
    assert call.tool_name == "get_weather"
    assert call.tool_kwargs["city"] in ("Paris", "London")


def test_structured_output() -> None:
    answer = CHAT.as_structured_llm(Capital).chat(MESSAGES)
    assert isinstance(answer.raw, Capital)
