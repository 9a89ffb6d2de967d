"""POST /v1/responses with OpenAI's own client: whole, streamed, parsed, with tools, and every way it is refused."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio
from answer_events import RESPONSES, check_types, read_events
from http_stack import Stack, serve, served
from openai import AsyncOpenAI
from openai.types.responses import Response

from text_generation_router.api.openai.input import read_arguments
from text_generation_router.web.structure import JsonTexts

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
"""The echo engine repeats the prompt, so that an answer begins with the templated conversation."""
DETAILED = (
    "{% for m in messages %}[{{ m.role }}]{{ m.reasoning_content }}{{ m.content }}"
    "{% for c in m.tool_calls %}({{ c.id }} {{ c.function.name }} {{ c.function.arguments.city }}){% endfor %}"
    "{% if m.tool_call_id %}({{ m.tool_call_id }} {{ m.name }}){% endif %}{% endfor %}"
    "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
)
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "How the weather is",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": True,
}
DEEP: dict[str, Any] = json.loads('{"a":' * 400 + "{}" + "}" * 400)
"""A value that can be parsed, but neither serialized nor given to a template."""


def client_of(stack: Stack) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"http://127.0.0.1:{stack.port}/v1", api_key="unused", max_retries=0)


pytestmark = pytest.mark.asyncio(loop_scope="module")

stack = served(chat_template=TEMPLATE)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(stack: Stack) -> AsyncIterator[AsyncOpenAI]:
    async with client_of(stack) as connected:
        yield connected


async def test_the_bytes_of_a_stream(stack: Stack) -> None:
    body = {"input": "Test request", "max_output_tokens": 3, "stream": True}
    _, written, headers = await stack.ask("/v1/responses", body)
    assert headers["content-type"] == "text/event-stream"
    events = read_events(written.encode())
    check_types(events, RESPONSES)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert sum(event["type"] == "response.output_text.delta" for event in events) == 3


async def test_items_become_messages(demo_model: Path) -> None:
    items: list[Any] = [
        {"role": "developer", "content": [{"type": "input_text", "text": "D"}]},
        {"type": "message", "role": "user", "content": "U"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "R"}]},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "A", "annotations": []}],
        },
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "X"}'},
        {"type": "function_call", "call_id": "c2", "name": "weather", "arguments": '{"city": "Y"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "sun"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "rain"}]},
        {"type": "reasoning", "id": "rs_2", "summary": [{"type": "summary_text", "text": "S"}]},
        {"type": "function_call", "call_id": "c3", "name": "weather", "arguments": '{"city": "Z"}'},
        {"type": "function_call_output", "call_id": "c3", "output": "fog"},
    ]
    expected = (
        "[system]D[user]U[assistant]RA(c1 weather X)(c2 weather Y)[tool]sun(c1 weather)[tool]rain(c2 weather)"
        "[assistant]S(c3 weather Z)[tool]fog(c3 weather)"
    )
    async with serve(demo_model, chat_template=DETAILED) as stack, client_of(stack) as client:
        length = len(stack.tokenizer.encode(expected, add_special_tokens=False).ids)
        response = await client.responses.create(
            model="tgi", input=items, tools=[WEATHER], tool_choice="none", max_output_tokens=length, temperature=0
        )
    assert response.output_text == expected


async def test_nothing_is_stored(client: AsyncOpenAI) -> None:
    response = await client.responses.create(model="tgi", input="Hi", max_output_tokens=1, store=True)
    with pytest.raises(openai.NotFoundError, match="not stored"):
        await client.responses.retrieve(response.id)
    with pytest.raises(openai.NotFoundError, match="not stored"):
        await client.responses.delete(response.id)


@pytest.mark.parametrize("tops", [0, 2])
async def test_log_probabilities_stand_beside_the_text_whole_and_streamed(client: AsyncOpenAI, tops: int) -> None:
    asked: Any = {"model": "tgi", "input": "Hello there, you", "max_output_tokens": 5}
    asked |= {"top_logprobs": tops} if tops else {"include": ["message.output_text.logprobs"]}
    response = await client.responses.create(**asked)
    assert (response.output_text, response.top_logprobs) == ("[user]Hello there", tops)
    [part] = response.output[0].content  # type: ignore[union-attr]
    scores: list[Any] = part.logprobs  # type: ignore[union-attr, assignment]
    assert "".join(score.token for score in scores) == response.output_text
    assert all(score.logprob <= 0 and len(score.top_logprobs) == tops for score in scores)
    streamed: list[Any] = []
    async for event in await client.responses.create(**asked, stream=True):
        if event.type == "response.output_text.delta":
            assert "".join(score.token for score in event.logprobs) == event.delta
            streamed += event.logprobs
        if event.type == "response.completed":
            assert event.response.output[0].content[0].logprobs == scores  # type: ignore[union-attr]
    assert [(score.token, score.logprob) for score in streamed] == [(score.token, score.logprob) for score in scores]


def called(**fields: object) -> dict[str, Any]:
    return {"input": [{"type": "function_call", **fields}]}


async def test_arguments_too_deep_to_be_written_again_stay_text(client: AsyncOpenAI) -> None:
    arguments = json.dumps(DEEP)
    assert read_arguments(arguments, JsonTexts()) == arguments
    body = called(call_id="c", name="f", arguments=arguments) | {"max_output_tokens": 1}
    response = await client.post("/responses", body=body, cast_to=Response)
    assert response.usage is not None
    assert response.usage.output_tokens == 1


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"previous_response_id": "resp_1"}, "`previous_response_id` is not supported: responses are not stored"),
        ({"conversation": "conv_1"}, "`conversation` is not supported"),
        ({"conversation": {"id": "conv_1"}}, "`conversation` is not supported"),
        ({"top_logprobs": 21}, "`top_logprobs` must be >= 0 and <= 20. Given: 21"),
        ({"tool_choice": {"type": "function", "name": "unknown"}}, "Tool with name unknown not found"),
        ({"input": []}, "`input` cannot be empty"),
        ({"input": [{"role": "wizard", "content": "Hi"}]}, "the role of an input message must be one of"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input items of type 'item_reference' are not supported"),
        (called(name="f"), "needs `call_id` and `name`"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "has no `call_id`"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "a content part of type `input_image` has no `image_url`",
        ),
    ],
)
async def test_unsupported_fields_are_refused_by_name(
    stack: Stack, client: AsyncOpenAI, body: dict[str, Any], message: str
) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as refused:
            await client.post("/responses", body={"input": "Hi", "stream": stream, **body}, cast_to=Response)
        assert message in str(refused.value)
        assert refused.value.type == "invalid_request_error"
    assert stack.permits.in_use == 0
