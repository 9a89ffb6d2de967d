"""langchain-openai, langchain-huggingface and langchain-anthropic."""

from __future__ import annotations

import pytest
from endpoint import ANSWER, OPENAI_URL, PROMPT, QUESTION, TOO_LONG, URL, Capital, get_weather
from langchain_anthropic import ChatAnthropic
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import HumanMessage
from langchain_huggingface import ChatHuggingFace, HuggingFaceEndpoint
from langchain_openai import ChatOpenAI, OpenAI


def openai_chat(**options: object) -> ChatOpenAI:
    return ChatOpenAI(
        model="tgi", base_url=OPENAI_URL, api_key="-", temperature=0, max_retries=0, **{"max_tokens": 40} | options
    )


@pytest.mark.parametrize("responses", [False, True])
def test_openai_answer_and_stream(responses: bool) -> None:
    chat = openai_chat(use_responses_api=responses, stream_usage=True)
    assert chat.invoke(QUESTION).text == ANSWER
    chunks = list(chat.stream(QUESTION))
    assert "".join(chunk.text for chunk in chunks) == ANSWER
    assert len(chunks) > 5
    assert sum(chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata) == 8


def test_openai_logprobs() -> None:
    reply = openai_chat(logprobs=True, top_logprobs=20).invoke(QUESTION)
    tokens = reply.response_metadata["logprobs"]["content"]
    assert "".join(token["token"] for token in tokens).startswith(ANSWER)
    assert all(len(token["top_logprobs"]) >= 20 for token in tokens)


@pytest.mark.parametrize("responses", [False, True])
def test_openai_tools_and_structured_output(responses: bool) -> None:
    chat = openai_chat(use_responses_api=responses)
    (call,) = chat.bind_tools([get_weather], tool_choice="get_weather").invoke(QUESTION).tool_calls
    assert call["name"] == "get_weather"
    assert call["args"]["city"] in ("Paris", "London")
    for method in ("json_schema", "function_calling"):
        assert isinstance(chat.with_structured_output(Capital, method=method).invoke(QUESTION), Capital)


def test_a_prompt_that_is_too_long_is_a_context_overflow() -> None:
    for chat in (openai_chat(), openai_chat(use_responses_api=True)):
        with pytest.raises(ContextOverflowError):
            chat.invoke(TOO_LONG)


@pytest.mark.parametrize("responses", [False, True])
@pytest.mark.parametrize("choice", ["auto", "required", "none"])
def test_tools_with_a_response_format(responses: bool, choice: str) -> None:
    """An agent with ProviderStrategy sends such requests."""
    chat = openai_chat(use_responses_api=responses)
    bound = chat.bind_tools([get_weather], tool_choice=choice, response_format=Capital, strict=True)
    reply = bound.invoke(QUESTION)
    if choice == "required" or reply.tool_calls:
        assert choice != "none"
        assert all(call["args"]["city"] in ("Paris", "London") for call in reply.tool_calls)
    else:
        Capital.model_validate_json(reply.text)


def test_openai_completions_of_twenty_prompts() -> None:
    model = OpenAI(model="tgi", base_url=OPENAI_URL, api_key="-", temperature=0, max_tokens=8, max_retries=0)
    assert model.invoke(PROMPT) == ANSWER
    answers = model.generate([PROMPT] * 20).generations
    assert [generation.text for (generation,) in answers] == [ANSWER] * 20


def test_huggingface_endpoint() -> None:
    model = HuggingFaceEndpoint(endpoint_url=URL, max_new_tokens=20, top_k=1, huggingfacehub_api_token="-")
    assert model.invoke(PROMPT) == ANSWER
    assert "".join(model.stream(PROMPT)).removesuffix("<|im_end|>") == ANSWER


def test_huggingface_chat() -> None:
    endpoint = HuggingFaceEndpoint(endpoint_url=URL, huggingfacehub_api_token="-")
    chat = ChatHuggingFace(llm=endpoint, max_tokens=40, model_kwargs={"top_p": 0.01})
    assert chat.invoke(QUESTION).content == ANSWER
    assert "".join(chunk.content for chunk in chat.stream(QUESTION)) == ANSWER
    (call,) = chat.bind_tools([get_weather], tool_choice="get_weather").invoke(QUESTION).tool_calls
    assert call["args"]["city"] in ("Paris", "London")
    assert chat.with_structured_output(Capital.model_json_schema(), method="json_schema").invoke(QUESTION)["city"]


def test_anthropic() -> None:
    chat = ChatAnthropic(model="tgi", base_url=URL, api_key="-", max_tokens=40, max_retries=0)
    assert chat.bind(extra_body={"temperature": 0}).invoke(QUESTION).text == ANSWER
    assert "".join(chunk.text for chunk in chat.bind(extra_body={"temperature": 0}).stream(QUESTION)) == ANSWER
    (call,) = chat.bind_tools([get_weather], tool_choice="get_weather").invoke(QUESTION).tool_calls
    assert call["args"]["city"] in ("Paris", "London")
    assert isinstance(chat.with_structured_output(Capital, method="json_schema").invoke(QUESTION), Capital)
    assert chat.get_num_tokens_from_messages([HumanMessage(QUESTION)]) > 10
    with pytest.raises(ContextOverflowError):
        chat.invoke(TOO_LONG)
