"""POST /v1/messages and count_tokens with Anthropic's own client: whole, streamed, with tools, and every way it is refused."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import pytest
import pytest_asyncio
from answer_events import MESSAGES, check_types, read_events
from anthropic import AsyncAnthropic
from anthropic.types import Message
from http_stack import Stack, serve, served
from pydantic import BaseModel
from sse_client import post

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


def client_of(stack: Stack) -> AsyncAnthropic:
    return AsyncAnthropic(base_url=f"http://127.0.0.1:{stack.port}", api_key="unused", max_retries=0)


pytestmark = pytest.mark.asyncio(loop_scope="module")

stack = served(chat_template=TEMPLATE, grammars=True)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(stack: Stack) -> AsyncIterator[AsyncAnthropic]:
    async with client_of(stack) as connected:
        yield connected


def count(stack: Stack, text: str) -> int:
    return len(stack.tokenizer.encode_ids(text, add_special_tokens=False))


async def test_a_stream_equals_a_whole_reply(stack: Stack, client: AsyncAnthropic) -> None:
    messages = [{"role": "user", "content": "schön 漢字 😀"}]
    asked: dict[str, Any] = {"model": "tgi", "messages": messages, "max_tokens": 40}
    whole = await client.messages.create(**asked)
    async with client.messages.stream(**asked) as stream:
        final = await stream.get_final_message()
    assert final.id != whole.id
    assert final.model_dump(exclude={"id"}) == whole.model_dump(exclude={"id"}) | {
        "content": final.model_dump()["content"]
    }
    assert final.content[0].text == whole.content[0].text
    _, written, headers = await stack.ask("/v1/messages", {**asked, "stream": True})
    assert headers["content-type"] == "text/event-stream"
    check_types(read_events(written.encode()), MESSAGES)


async def test_blocks_become_messages(stack: Stack, client: AsyncAnthropic) -> None:
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
        "[system]Be brief.\nBe kind."
        "[user]A\nB[assistant]TC(t1 weather X)(t2 weather Y)[tool]sun(t1 weather)[tool]Error: no(t2 weather)"
        "[user]D[user]E<weather>[answer]False"
    )
    asked: dict[str, Any] = {"model": "tgi", "messages": messages, "tools": [WEATHER], "thinking": {"type": "disabled"}}
    asked["system"] = [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind."}]
    counted = await client.messages.count_tokens(**asked)
    assert counted.input_tokens == count(stack, expected)
    message = await client.messages.create(**asked, max_tokens=counted.input_tokens)
    assert message.usage.input_tokens == counted.input_tokens
    assert message.content[0].text == expected


BILLING = "x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch={};"
RULES = "Follow the rules. " * 40


def texts(*blocks: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": block} for block in blocks]


@pytest.mark.parametrize(
    ("system", "messages", "prompt"),
    [
        (texts(BILLING, RULES, "Be kind."), HI, f"[system]{RULES}\nBe kind.[user]Hi[answer]"),
        (texts(RULES, BILLING + "\n"), HI, f"[system]{RULES}[user]Hi[answer]"),
        (f"{BILLING}\n{RULES}", HI, f"[system]{RULES}[user]Hi[answer]"),
        (texts(BILLING), [{"role": "user", "content": RULES}], f"[user]{RULES}[answer]"),
        (RULES, [*HI, {"role": "system", "content": f"{BILLING}\n\nStop."}], f"[system]{RULES}[user]Hi[system]Stop.[answer]"),
        (RULES, [*HI, {"role": "system", "content": texts(BILLING, "Stop.")}], f"[system]{RULES}[user]Hi[system]\nStop.[answer]"),
    ],
)  # fmt: skip
async def test_claude_codes_billing_header_is_left_out(
    stack: Stack, client: AsyncAnthropic, system: str | list[Any], messages: list[Any], prompt: str
) -> None:
    """Its values change with the request. The prompt does not, so that it is found in the prefix cache."""
    usages = []
    for value in ("36ee5", "0aaa9"):
        asked: dict[str, Any] = json.loads(json.dumps({"system": system, "messages": messages}).replace("{}", value))
        counted = await client.messages.count_tokens(model="tgi", **asked)
        assert counted.input_tokens == count(stack, prompt)
        message = await client.messages.create(model="tgi", max_tokens=counted.input_tokens, **asked)
        assert message.content[0].text == prompt
        usages.append(message.usage)
    assert usages[1].cache_read_input_tokens > 0.8 * count(stack, prompt)


@pytest.mark.parametrize(
    "system",
    [
        "x-anthropic-billing-header: what is it?",
        f"{BILLING} What is this line?",
        f"Explain this line:\n{BILLING}",
        "x-anthropic-billing-header:\ncch=1;",
    ],
)
async def test_a_system_prompt_about_the_billing_header_stays(client: AsyncAnthropic, system: str) -> None:
    messages: list[Any] = [{"role": "user", "content": BILLING}]
    message = await client.messages.create(model="tgi", max_tokens=200, system=system, messages=messages)
    assert message.content[0].text.startswith(f"[system]{system}[user]{BILLING}[answer]")


async def test_a_gateway_passes_the_billing_header_to_openais_routes(stack: Stack) -> None:
    for system in (f"{BILLING}\nBe brief.", texts(BILLING, "Be brief.")):
        for role in ("system", "developer"):
            messages = [{"role": role, "content": system}, {"role": "user", "content": BILLING}]
            reply = await post(stack.client, "/v1/chat/completions", {"messages": messages, "max_tokens": 60})
            answer = reply["choices"][0]["message"]["content"]
            assert answer.startswith(f"[system]Be brief.[user]{BILLING}[answer]")
    asked = {"instructions": f"{BILLING}\nBe brief.", "input": "Hi", "max_output_tokens": 60}
    [item] = (await post(stack.client, "/v1/responses", asked))["output"]
    assert item["content"][0]["text"].startswith("[system]Be brief.[user]Hi[answer]")


async def test_the_assistants_last_message_is_continued_exactly(stack: Stack, client: AsyncAnthropic) -> None:
    messages: list[Any] = [*HI, {"role": "assistant", "content": "The answer is  "}]
    prompt = "[user]Hi[assistant]The answer is  "
    message = await client.messages.create(model="tgi", messages=messages, max_tokens=count(stack, prompt))
    assert message.content[0].text == prompt


class Person(BaseModel):
    name: str
    age: int


async def test_a_text_is_parsed_into_the_requested_type(client: AsyncAnthropic) -> None:
    message = await client.messages.parse(model="tgi", messages=HI, max_tokens=300, output_format=Person)
    assert isinstance(message.parsed_output, Person)
    assert message.stop_reason == "end_turn"


def said(role: str, *blocks: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(blocks)}]}


IMAGE = {"type": "image", "source": {"type": "base64", "data": "AA=="}}
RESULT = {"type": "tool_result", "tool_use_id": "t", "content": [IMAGE]}
WEB_SEARCH = {"type": "web_search_20250305", "name": "web_search"}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"thread": {"type": "create"}}, "`thread` is not supported"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "must be strictly positive"),
        ({"mcp_servers": [{"url": "https://a"}]}, "`mcp_servers` is not supported here"),
        ({"container": "c"}, "`container` is not supported here"),
        ({"response_format": {"type": "json_object"}}, "Use `output_config.format`"),
        ({"stop": ["a"]}, "Use `stop_sequences`"),
        ({"n": 2}, "`n` is not supported here"),
        ({"seed": 1}, "`seed` is not supported here"),
        ({"tools": [{"name": "f"}]}, "the tool 'f' has no `input_schema`"),
        ({"tool_choice": {"type": "any"}}, "requires a call, but there are no `tools`"),
        ({"thinking": {"type": "foo"}}, "`thinking.type` must be one of `adaptive`, `disabled`, `enabled`"),
        (said("user", {"type": "text"}), "a block of type `text` has no `text`"),
        ({"system": [{"type": "text"}]}, "a block of type `text` has no `text`"),
        ({"messages": []}, "`messages` cannot be empty"),
        (said("user"), "`messages` have no content"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "the role of a message must be one of"),
        (said("user", IMAGE), "image modality is not supported: this model takes no images"),
        (said("user", IMAGE | {"source": {"type": "file"}}), "the `source` of an image must have"),
        (said("assistant", IMAGE), "blocks of type 'image' are not supported in messages of role `assistant`"),
        (said("user", {"type": "tool_result"}), "has no `tool_use_id`"),
        (said("user", RESULT), "image modality is not supported: this model takes no images"),
        (said("assistant", {"type": "tool_use"}), "needs `id` and `name`"),
        ({"system": [IMAGE]}, "blocks of type 'image' are not supported"),
        ({"tools": [WEB_SEARCH]}, "'web_search_20250305' are not supported"),
        (
            {"tools": [{"name": "f", "input_schema": {}}], "tool_choice": {"type": "tool", "name": "g"}},
            "Tool with name g not found",
        ),
        ({"tool_choice": {"type": "tool"}}, "has no `name`"),
        ({"tool_choice": {"type": "some"}}, "a tool choice of type 'some' is not supported"),
        ({"stop_sequences": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"output_config": {"format": {"type": "yaml"}}}, "unknown type"),
        ({"messages": HI * (MAX_MESSAGES + 1)}, "`messages` must have at most"),
        (said("user", *[{"type": "text"}] * (MAX_BLOCKS + 1)), "`messages[0].content` must have at most"),
        ({"system": [{"type": "text"}] * (MAX_BLOCKS + 1)}, "`system` must have at most"),
    ],
)
async def test_unsupported_fields_are_refused_by_name(
    stack: Stack, client: AsyncAnthropic, body: dict[str, Any], message: str
) -> None:
    for stream in (False, True):
        with pytest.raises(anthropic.BadRequestError) as refused:
            asked = {"messages": HI, "max_tokens": 5, "stream": stream, **body}
            await client.post("/v1/messages", body=asked, cast_to=Message)
        assert message in str(refused.value)
        assert refused.value.body["type"] == "error"
        assert refused.value.body["error"]["type"] == "invalid_request_error"
    assert stack.permits.in_use == 0


async def test_counting_takes_no_permit_and_refuses_threads(demo_model: Path) -> None:
    limited = serve(demo_model, chat_template=TEMPLATE, max_concurrent_requests=1)
    async with limited as stack, client_of(stack) as client, stack.permits.take(1):
        counted = await client.messages.count_tokens(model="tgi", messages=HI)
        assert counted.input_tokens == count(stack, "[user]Hi[answer]")
        with pytest.raises(anthropic.RateLimitError):
            await client.messages.create(model="tgi", messages=HI, max_tokens=5, extra_body={"thread": None})
        with pytest.raises(anthropic.BadRequestError, match="thread_unsupported_request"):
            await client.messages.count_tokens(model="tgi", messages=HI, extra_body={"thread": "x"})
