"""POST /v1/messages and count_tokens with Anthropic's own client: whole, streamed, with tools, and every way it is refused."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import pytest
from answer_events import MESSAGES, check_types, read_events
from anthropic import AsyncAnthropic, beta_async_tool
from anthropic.types import Message
from http_stack import Stack, serve
from pydantic import BaseModel

from text_generation_router.api.anthropic.schemas import MAX_BLOCKS, MAX_MESSAGES

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.reasoning_content }}{{ m.content }}"
    "{% for c in m.tool_calls %}({{ c.id }} {{ c.function.name }} {{ c.function.arguments.city }}){% endfor %}"
    "{% if m.tool_call_id %}({{ m.tool_call_id }} {{ m.name }}){% endif %}{% endfor %}"
    "{% for t in tools or [] %}<{{ t.function.name }}>{% endfor %}{% if add_generation_prompt %}[answer]{% endif %}"
    "{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}"
)
"""The echo engine repeats the prompt, so that an answer begins with the templated conversation."""
WEATHER: dict[str, Any] = {
    "name": "weather",
    "description": "How the weather is",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
HI = [{"role": "user", "content": "Hi"}]


@asynccontextmanager
async def connected(model: Path, **options: object) -> AsyncIterator[tuple[Stack, AsyncAnthropic]]:
    async with serve(model, **{"chat_template": TEMPLATE, **options}) as stack:
        url = f"http://127.0.0.1:{stack.port}"
        async with AsyncAnthropic(base_url=url, api_key="unused", max_retries=0) as client:
            yield stack, client


@pytest.fixture
async def stack_and_client(demo_model: Path) -> AsyncIterator[tuple[Stack, AsyncAnthropic]]:
    async with connected(demo_model) as both:
        yield both


Both = tuple[Stack, AsyncAnthropic]


async def count(stack: Stack, text: str) -> int:
    return len((await stack.tokenizer.encode(text, add_special_tokens=False)).ids)


async def test_a_message_is_answered(stack_and_client: Both) -> None:
    stack, client = stack_and_client
    prompt = "[system]Be brief.\nBe kind.[user]Hi[answer]"
    message = await client.messages.create(
        model="m",
        system=[{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind."}],
        messages=HI,
        max_tokens=await count(stack, prompt),
        metadata={"user_id": "me"},
        extra_body={"temperature": 0.0, "top_p": 1.0, "top_k": 40},  # the client has no names for them any more
    )
    Message.model_validate(message.model_dump())
    [block] = message.content
    assert block.type == "text"
    assert block.text == prompt
    assert (message.stop_reason, message.stop_sequence) == ("max_tokens", None)
    assert (message.usage.input_tokens, message.usage.output_tokens) == (await count(stack, prompt),) * 2
    assert (message.model, message.id[:4]) == ("m", "msg_")
    await stack.assert_empty()


async def test_a_stop_sequence_is_cut_and_reported(stack_and_client: Both) -> None:
    _, client = stack_and_client
    asked: dict[str, Any] = {
        "model": "m",
        "messages": [{"role": "user", "content": "one two three"}],
        "max_tokens": 100,
        "stop_sequences": ["none", " three"],
    }
    message = await client.messages.create(**asked)
    assert message.content[0].text == "[user]one two"
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", " three")
    async with client.messages.stream(**asked) as stream:
        text = "".join([text async for text in stream.text_stream])
        final = await stream.get_final_message()
    assert text == "[user]one two"
    assert (final.stop_reason, final.stop_sequence) == ("stop_sequence", " three")


async def test_a_stream_equals_a_whole_reply(stack_and_client: Both) -> None:
    stack, client = stack_and_client
    asked: dict[str, Any] = {
        "model": "m",
        "messages": [{"role": "user", "content": "schön 漢字 😀"}],
        "max_tokens": 40,
    }
    whole = await client.messages.create(**asked)
    async with client.messages.stream(**asked) as stream:
        final = await stream.get_final_message()
    assert final.id != whole.id
    assert final.model_dump(exclude={"id"}) == whole.model_dump(exclude={"id"}) | {
        "content": final.model_dump()["content"]
    }
    assert final.content[0].text == whole.content[0].text
    async with stack.client.post("/v1/messages", json={**asked, "stream": True}) as response:
        assert response.headers["content-type"] == "text/event-stream"
        check_types(read_events(await response.read()), MESSAGES)


async def test_blocks_become_messages(stack_and_client: Both) -> None:
    stack, client = stack_and_client
    messages: list[Any] = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "A", "cache_control": None}, {"type": "text", "text": "B"}],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "T", "signature": ""},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "C"},
                {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "X"}},
                {"type": "tool_use", "id": "t2", "name": "weather", "input": {"city": "Y"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "sun"},
                {
                    "type": "tool_result",
                    "tool_use_id": "t2",
                    "content": [{"type": "text", "text": "no"}],
                    "is_error": True,
                },
                {"type": "text", "text": "D"},
            ],
        },
        {"role": "user", "content": "E"},
    ]
    expected = (
        "[user]A\nB[assistant]TC(t1 weather X)(t2 weather Y)[tool]sun(t1 weather)[tool]Error: no(t2 weather)"
        "[user]D[user]E<weather>[answer]False"
    )
    asked: dict[str, Any] = {
        "model": "m",
        "messages": messages,
        "tools": [WEATHER],
        "thinking": {"type": "disabled"},
    }
    counted = await client.messages.count_tokens(**asked)
    assert counted.input_tokens == await count(stack, expected)
    message = await client.messages.create(**asked, max_tokens=counted.input_tokens)
    assert message.usage.input_tokens == counted.input_tokens
    assert message.content[0].text == expected


async def test_the_assistants_last_message_is_continued_exactly(stack_and_client: Both) -> None:
    stack, client = stack_and_client
    messages: list[Any] = [*HI, {"role": "assistant", "content": "The answer is  "}]
    prompt = "[user]Hi[assistant]The answer is  "
    message = await client.messages.create(model="m", messages=messages, max_tokens=await count(stack, prompt))
    assert message.content[0].text == prompt


async def test_a_tool_use_and_its_result_go_round(demo_model: Path) -> None:
    async with connected(demo_model, grammars=True) as (_, client):
        asked: dict[str, Any] = {"model": "m", "tools": [WEATHER], "max_tokens": 200}
        whole = await client.messages.create(**asked, messages=HI, tool_choice={"type": "any"})
        [use] = whole.content
        assert use.type == "tool_use"
        assert (use.name, set(use.input), whole.stop_reason) == ("weather", {"city"}, "tool_use")

        async with client.messages.stream(
            **asked, messages=HI, tool_choice={"type": "tool", "name": "weather"}
        ) as stream:
            events = [event async for event in stream]
            final = await stream.get_final_message()
        assert final.content[0].input == use.input
        assert final.content[0].id != use.id
        assert final.stop_reason == "tool_use"
        assert sum(event.type == "input_json" for event in events) > 1

        result: Any = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "sun"}]}
        after = await client.messages.create(
            **asked | {"max_tokens": 60},
            messages=[*HI, {"role": "assistant", "content": whole.content}, result],
            tool_choice={"type": "none"},
        )
        assert f"({use.id} weather " in after.content[0].text


async def test_an_input_cut_by_the_length_is_empty(demo_model: Path) -> None:
    async with connected(demo_model, grammars=True) as (_, client):
        message = await client.messages.create(
            model="m", messages=HI, tools=[WEATHER], tool_choice={"type": "any"}, max_tokens=11
        )
    assert message.stop_reason == "max_tokens"
    assert [(block.type, block.input) for block in message.content] == [("tool_use", {})]


class Person(BaseModel):
    name: str
    age: int


async def test_a_text_is_parsed_into_the_requested_type(demo_model: Path) -> None:
    async with connected(demo_model, grammars=True) as (_, client):
        message = await client.messages.parse(model="m", messages=HI, max_tokens=300, output_format=Person)
    assert isinstance(message.parsed_output, Person)
    assert message.stop_reason == "end_turn"


async def test_reasoning_is_a_block(demo_model: Path) -> None:
    async with connected(demo_model, chat_template="{{ messages[0].content }}", reasoning=True) as (stack, client):
        text = "<think>\nLet me see.\n</think>\n\nIt is so."
        asked: dict[str, Any] = {
            "model": "m",
            "messages": [{"role": "user", "content": text}],
            "max_tokens": await count(stack, text),
        }
        whole = await client.messages.create(**asked)
        async with client.messages.stream(**asked) as stream:
            final = await stream.get_final_message()
    for message in (whole, final):
        thinking, said = message.content
        assert (thinking.type, thinking.thinking, thinking.signature) == ("thinking", "Let me see.", "")
        assert (said.type, said.text) == ("text", "It is so.")


@pytest.mark.parametrize("thread", [{"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}, "x"])
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_a_thread_is_refused_so_that_clients_send_all(stack_and_client: Both, thread: object, path: str) -> None:
    stack, _ = stack_and_client
    async with stack.client.post(path, json={"messages": HI, "max_tokens": 1, "thread": thread}) as response:
        assert response.status == 422
        reply = await response.json()
    message = reply["error"].pop("message")
    assert "`thread` is not supported" in message
    assert reply == {
        "type": "error",
        "error": {
            "type": "invalid_request_error",
            "details": {"error_code": "thread_unsupported_request", "unsupported": ["thread"]},
        },
    }
    async with stack.client.post(path, json={"messages": HI, "max_tokens": 1, "thread": None}) as response:
        assert response.status == 200


async def test_anthropics_runner_of_tools_keeps_its_history(demo_model: Path) -> None:
    """The runner requests a thread first; with one it would send only new messages."""

    @beta_async_tool
    async def weather(city: str) -> str:
        """How the weather is."""
        return f"sun in {city}"

    says = '<tool_call>\n{"name": "weather", "arguments": {"city": "X"}}\n</tool_call>END'
    template = (
        "{% if messages|length == 1 %}{{ messages[0].content }}{% else %}"
        "{% for m in messages %}[{{ m.role }}]{% if m.role == 'tool' %}{{ m.content }}{% endif %}{% endfor %}{% endif %}"
    )
    async with connected(demo_model, chat_template=template, tool_call_parser="hermes", grammars=True) as (_, client):
        runner = client.beta.messages.tool_runner(
            model="m",
            max_tokens=60,
            stop_sequences=["END"],
            messages=[{"role": "user", "content": says}],
            tools=[weather],
            max_iterations=2,
        )
        used, said = [message async for message in runner]
    assert [block.type for block in used.content] == ["tool_use"]
    assert said.content[0].text.startswith("[user][assistant][tool]sun in X")


@pytest.mark.parametrize(
    "body",
    [
        {"messages": HI * (MAX_MESSAGES + 1)},
        {"messages": [{"role": "user", "content": [{"type": "text"}] * (MAX_BLOCKS + 1)}]},
        {"messages": HI, "system": [{"type": "text"}] * (MAX_BLOCKS + 1)},
    ],
)
async def test_a_conversation_has_limits(stack_and_client: Both, body: dict[str, Any]) -> None:
    stack, _ = stack_and_client
    async with stack.client.post("/v1/messages", json={"max_tokens": 1, **body}) as response:
        assert response.status == 422
        assert "Failed to deserialize" in (await response.json())["error"]["message"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "must be strictly positive"),
        ({"messages": []}, "`messages` cannot be empty"),
        ({"messages": [{"role": "user", "content": []}]}, "`messages` have no content"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "the role of a message must be one of"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "blocks of type 'image' are not supported in messages of role `user`",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "blocks of type 'document'"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "has no `tool_use_id`"),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image"}]}],
                    }
                ]
            },
            "blocks of type 'image' are not supported",
        ),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]}, "needs `id` and `name`"),
        ({"system": [{"type": "image"}]}, "blocks of type 'image' are not supported"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "'web_search_20250305' are not supported"),
        ({"tools": [{"name": "f"}], "tool_choice": {"type": "tool", "name": "g"}}, "Tool with name g not found"),
        ({"tool_choice": {"type": "tool"}}, "has no `name`"),
        ({"tool_choice": {"type": "some"}}, "a tool choice of type 'some' is not supported"),
        ({"stop_sequences": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"output_config": {"format": {"type": "yaml"}}}, "unknown type"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_unsupported_fields_are_refused_by_name(
    stack_and_client: Both, body: dict[str, Any], message: str, stream: bool
) -> None:
    stack, client = stack_and_client
    asked = {"messages": HI, "max_tokens": 5, "stream": stream, **body}
    with pytest.raises(anthropic.UnprocessableEntityError) as refused:
        await client.post("/v1/messages", body=asked, cast_to=Message)
    assert message in str(refused.value)
    assert refused.value.body["type"] == "error"
    assert refused.value.body["error"]["type"] == "invalid_request_error"
    assert stack.permits.in_use == 0


async def test_a_failure_before_the_first_event_has_its_status_and_after_it_an_ending(demo_model: Path) -> None:
    async with connected(demo_model) as (stack, _):
        first, *_, last = (await stack.tokenizer.encode("[user]one two", add_special_tokens=False)).ids
    asked: dict[str, Any] = {
        "model": "m",
        "messages": [{"role": "user", "content": "one two"}],
        "max_tokens": 50,
    }
    async with connected(demo_model, echo_fail_token=first) as (_, client):
        with pytest.raises(anthropic.APIStatusError) as failed:
            async with client.messages.stream(**asked) as stream:
                await stream.until_done()
        assert failed.value.status_code == 424
    async with connected(demo_model, echo_fail_token=last) as (stack, client):
        texts = []
        with pytest.raises(anthropic.APIStatusError, match="failed during generation"):
            async with client.messages.stream(**asked) as events:
                async for text in events.text_stream:
                    texts.append(text)
        assert "".join(texts) == "[user]one"
        assert 'tgi_request_failure{err="generation"} 1\n' in stack.metrics.exposition().decode()


async def test_counting_takes_no_permit(demo_model: Path) -> None:
    async with connected(demo_model, max_concurrent_requests=1) as (stack, client):
        with stack.permits.take(1):
            counted = await client.messages.count_tokens(model="m", messages=HI)
            assert counted.input_tokens == await count(stack, "[user]Hi[answer]")
            with pytest.raises(anthropic.RateLimitError):
                await client.messages.create(model="m", messages=HI, max_tokens=5)


async def test_a_key_is_taken_from_anthropics_header(stack_and_client: Both) -> None:
    stack, _ = stack_and_client
    body = {"messages": HI, "max_tokens": 1}
    for headers in ({"anthropic-version": "2023-06-01", "x-api-key": "k"}, {}):
        async with stack.client.post("/v1/messages", json=body, headers=headers) as response:
            assert response.status == 200, await response.text()
