"""huggingface_hub: InferenceClient and AsyncInferenceClient. `text_generation` posts to the base URL."""

from __future__ import annotations

import json
from collections.abc import Iterator

import jsonschema
import pytest
from client_server import ANSWER, ANSWER_TOKENS, CITY, MESSAGES, PLACE, PROMPT, WEATHER, Server
from huggingface_hub import InferenceClient

pytestmark = [pytest.mark.system, pytest.mark.model]

ONLY_NEW = {"return_full_text": False}


@pytest.fixture
def client(server: Server) -> Iterator[InferenceClient]:
    with InferenceClient(base_url=server.url, timeout=60) as client:
        yield client


def test_text(client: InferenceClient) -> None:
    """Full text is TGI's default on the base URL; the client sends no value."""
    assert client.text_generation(PROMPT, **ONLY_NEW, max_new_tokens=20) == ANSWER
    assert client.text_generation(PROMPT, max_new_tokens=20) == PROMPT + ANSWER


def test_text_with_details(client: InferenceClient, server: Server) -> None:
    reply = client.text_generation(
        PROMPT, **ONLY_NEW, max_new_tokens=20, details=True, decoder_input_details=True, top_n_tokens=2
    )
    details = reply.details
    assert reply.generated_text == ANSWER
    assert (details.finish_reason, details.generated_tokens, details.seed) == ("eos_token", ANSWER_TOKENS, None)
    assert "".join(token.text for token in details.tokens) == ANSWER + "<|im_end|>"
    assert [token.special for token in details.tokens] == [False] * 7 + [True]
    assert [token.id for token in details.prefill] == server.tokenizer.encode(PROMPT).ids
    assert details.prefill[0].logprob is None
    assert all(token.logprob < 0 for token in details.prefill[1:])
    # The client does not convert nested lists.
    assert [tops[0]["id"] for tops in details.top_tokens] == [token.id for token in details.tokens]


def test_text_as_a_stream_with_details(client: InferenceClient, server: Server) -> None:
    events = list(client.text_generation(PROMPT, **ONLY_NEW, max_new_tokens=20, stream=True, details=True))
    assert [event.index for event in events] == list(range(1, ANSWER_TOKENS + 1))
    assert "".join(event.token.text for event in events if not event.token.special) == ANSWER
    assert [event.generated_text for event in events] == [None] * 7 + [ANSWER]
    ending = events[-1].details
    assert (ending.finish_reason, ending.generated_tokens) == ("eos_token", ANSWER_TOKENS)
    assert ending.input_length == server.count(PROMPT)


def test_text_with_a_grammar(client: InferenceClient) -> None:
    text = client.text_generation(PROMPT, **ONLY_NEW, max_new_tokens=40, grammar={"type": "json", "value": CITY})
    jsonschema.validate(json.loads(text), CITY)
    regex = {"type": "regex", "value": "(Rome|Oslo)!"}
    assert client.text_generation(PROMPT, **ONLY_NEW, grammar=regex) in ("Rome!", "Oslo!")


def test_chat(client: InferenceClient, server: Server) -> None:
    reply = client.chat_completion(MESSAGES, max_tokens=20, temperature=0.0, logprobs=True, top_logprobs=2)
    (choice,) = reply.choices
    assert (choice.message.content, choice.finish_reason) == (ANSWER, "stop")
    usage = reply.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (server.count(PROMPT), ANSWER_TOKENS)
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    tokens = choice.logprobs.content
    assert "".join(token.token for token in tokens) == ANSWER
    assert all(token.top_logprobs[0].token == token.token and token.logprob <= 0 for token in tokens)
    choice = client.chat_completion(MESSAGES, max_tokens=20, temperature=0.0, stop=["France"]).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("The capital of ", "stop")


def test_chat_as_a_stream(client: InferenceClient, server: Server) -> None:
    chunks = list(
        client.chat_completion(
            MESSAGES, max_tokens=20, temperature=0.0, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices) == ANSWER
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason] == ["stop"]
    assert chunks[-1].usage.completion_tokens == ANSWER_TOKENS
    assert chunks[-1].usage.prompt_tokens == server.count(PROMPT)


def test_chat_with_required_tool(client: InferenceClient) -> None:
    reply = client.chat_completion(MESSAGES, max_tokens=40, temperature=0.0, tools=[WEATHER], tool_choice="required")
    choice = reply.choices[0]
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls"
    assert (call.type, call.function.name) == ("function", "get_weather")
    jsonschema.validate(json.loads(call.function.arguments), PLACE)


@pytest.mark.parametrize(
    "response_format",
    [
        {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}},
        {"type": "json", "value": CITY},
    ],
    ids=["json_schema", "json"],
)
def test_chat_with_response_format(client: InferenceClient, response_format: dict[str, object]) -> None:
    reply = client.chat_completion(MESSAGES, max_tokens=40, temperature=0.0, response_format=response_format)
    jsonschema.validate(json.loads(reply.choices[0].message.content), CITY)


def test_server_information(client: InferenceClient, server: Server) -> None:
    info = InferenceClient(base_url=server.url, provider="hf-inference").get_endpoint_info()
    assert info["model_id"] == server.model
    assert (info["max_total_tokens"], info["max_concurrent_requests"]) == (1024, 8)
    assert InferenceClient(base_url=server.url, provider="hf-inference").health_check() is True
