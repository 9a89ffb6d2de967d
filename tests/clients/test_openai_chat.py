"""The openai Python client: chat completions."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from client_server import ANSWER, ANSWER_TOKENS, MESSAGES, PROMPT, Server
from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam
from pydantic import BaseModel, ConfigDict, Field

pytestmark = [pytest.mark.system, pytest.mark.model]

GREEDY: dict[str, Any] = {"model": "tgi", "messages": MESSAGES, "temperature": 0, "max_tokens": 20}


class City(BaseModel):
    """The schema of a parsed answer."""

    model_config = ConfigDict(extra="forbid")

    name: Literal["Paris", "London"]
    rank: int = Field(ge=1, le=9)


def test_chat(openai_client: OpenAI, server: Server) -> None:
    reply = openai_client.chat.completions.create(**GREEDY)
    (choice,) = reply.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", ANSWER, "stop")
    assert choice.message.tool_calls is None
    assert reply.id.startswith("chatcmpl-")
    assert (reply.object, reply.model) == ("chat.completion", server.model)
    assert reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (server.count(PROMPT), ANSWER_TOKENS)
    assert reply.usage.total_tokens == server.count(PROMPT) + ANSWER_TOKENS
    assert reply._request_id
    assert openai_client.chat.completions.create(**GREEDY).id != reply.id


def test_n_answers_differ_when_sampled(openai_client: OpenAI) -> None:
    arguments = {**GREEDY, "temperature": 2.0, "max_tokens": 6, "seed": 3, "top_p": 1.0, "n": 3}
    one, same = (openai_client.chat.completions.create(**arguments) for _ in range(2))
    texts = [choice.message.content for choice in one.choices]
    assert len(set(texts)) == 3
    assert same.choices[0].message.content == texts[0]  # the seed is the first one's: the others draw their own


def test_logit_bias(openai_client: OpenAI, server: Server) -> None:
    paris, london = server.tokenizer.encode(" Paris").ids, server.tokenizer.encode(" London").ids
    bias = {str(paris[0]): -100, str(london[0]): 100}
    reply = openai_client.chat.completions.create(**GREEDY | {"max_tokens": 2}, logit_bias=bias)
    assert reply.choices[0].message.content == " London London"
    reply = openai_client.chat.completions.create(**GREEDY, logit_bias={str(paris[0]): -100})
    assert "Paris" not in (reply.choices[0].message.content or "")


def test_stream_helper(openai_client: OpenAI) -> None:
    with openai_client.chat.completions.stream(**GREEDY) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert "".join(deltas) == ANSWER
    assert (final.choices[0].message.content, final.choices[0].finish_reason) == (ANSWER, "stop")
    assert final.choices[0].message.role == "assistant"


def test_continued_answer(openai_client: OpenAI) -> None:
    begun: list[ChatCompletionMessageParam] = [*MESSAGES, {"role": "assistant", "content": "The capital of France"}]
    reply = openai_client.chat.completions.create(**GREEDY | {"messages": begun})
    assert reply.choices[0].message.content == " is Paris."


def test_parse(openai_client: OpenAI) -> None:
    """The client sends a pydantic model as a strict JSON schema."""
    reply = openai_client.chat.completions.parse(**GREEDY | {"max_tokens": 30}, response_format=City)
    with openai_client.chat.completions.stream(**GREEDY | {"max_tokens": 30}, response_format=City) as stream:
        streamed = stream.get_final_completion()
    assert isinstance(reply.choices[0].message.parsed, City)
    assert reply.choices[0].finish_reason == "stop"
    assert streamed.choices[0].message.parsed == reply.choices[0].message.parsed
