"""Answers with the special tokens of real tokenizers, through the whole server.

The echo engine repeats the prompt: the messages are the answer. The tokenizers have the tokens of the answers, with their ids
(`small_tokenizer`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest
import pytest_asyncio
from http_stack import Stack, serve
from json_call_answers import TOOLS
from jsonschema import Draft202012Validator
from model_answers import TABLES
from parser_events import Call, Part, Thought
from small_tokenizer import FOLDER, FORMATS
from sse_client import Json, asking, chunks, joined, post, whole

CHAT = "/v1/chat/completions"
ASKED = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in TOOLS.items()]
MARKS = {"hermes": "<tool_call>", "qwen3_coder": "<function=", "deepseek_v3": "<｜tool▁calls▁begin｜>"}
"""Texts in a template from which the format is known; for gpt-oss its special tokens are enough."""
ENDS = {"openai": "<|start|>assistant"}
"""The end of the prompt."""
SERVERS = [(name, kind) for name, kinds in FORMATS.items() for kind in kinds]

pytestmark = pytest.mark.asyncio(loop_scope="module")


def template(kind: str) -> str:
    written = "{% for message in messages %}{{ message.content }}{% endfor %}{% if tools %}{% endif %}"
    return f"{written}{ENDS.get(kind, '')}{{# {MARKS.get(kind, '')} #}}"


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=SERVERS, ids=lambda pair: ": ".join(pair))
async def served(request: pytest.FixtureRequest) -> AsyncIterator[tuple[Stack, str]]:
    name, kind = request.param
    form, _, reasoning = kind.partition("+")
    async with serve(FOLDER / name, chat_template=template(form), reasoning=bool(reasoning)) as stack:
        yield stack, kind


def message(parts: Sequence[Part]) -> Json:
    """Return an answer of these parts in the form of `joined`."""
    return {
        "content": "".join(part for part in parts if isinstance(part, str)),
        "reasoning_content": "".join(part.text for part in parts if isinstance(part, Thought)),
        "tool_calls": [part._asdict() for part in parts if isinstance(part, Call)],
        "finish_reason": "length",
    }


async def test_an_answer_is_parsed_from_tokens(served: tuple[Stack, str]) -> None:
    stack, kind = served
    for case, (says, parts) in TABLES[kind].items():
        body = asking(stack.tokenizer, says, tools=ASKED)
        expected = message([says] if parts is None else parts)
        assert whole(await post(stack.client, CHAT, body)) == expected, case
        assert joined(await chunks(stack.client, CHAT, body)) == expected, case
    await stack.assert_empty()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def harmony(demo_model: Path) -> AsyncIterator[Stack]:
    """A server of Harmony; its tokenizer has none of the special tokens, so that they are text in prompts."""
    async with serve(
        demo_model, chat_template=template("openai"), tool_call_parser="gpt-oss", grammars=True
    ) as running:
        yield running


async def test_calls_in_the_begun_answer_of_a_prompt_are_not_counted(demo_model: Path) -> None:
    """A user can write them: the template of this server adds nothing to the messages."""
    says = '<|start|>assistant<|channel|>commentary to=functions.search <|message|>{"query": "a"}<|call|>'
    async with serve(demo_model, chat_template=template(""), tool_call_parser="gpt-oss") as stack:
        body = asking(stack.tokenizer, says, tools=ASKED)
        answer = whole(await post(stack.client, CHAT, body))
        assert joined(await chunks(stack.client, CHAT, body)) == answer
    assert answer["tool_calls"] == [{"name": "search", "arguments": '{"query": "a"}'}]


async def test_a_forced_call_continues_the_prompt_of_its_format(harmony: Stack) -> None:
    for choice in ("required", {"type": "function", "function": {"name": "search"}}):
        body = asking(harmony.tokenizer, "Talk.", tools=ASKED, tool_choice=choice, stop=["STOP"]) | {"max_tokens": 200}
        answer = whole(await post(harmony.client, CHAT, body))
        assert joined(await chunks(harmony.client, CHAT, body)) == answer
        [call] = answer["tool_calls"]
        assert call["name"] in TOOLS
        assert isinstance(orjson.loads(call["arguments"]), dict)
        assert answer["content"] == ""
    async with harmony.client.post(CHAT, json=body) as response:
        prompt = "Talk.<|start|>assistant<|channel|>commentary to=functions <|constrain|>json<|message|>"
        assert response.headers["x-compute-characters"] == str(len(prompt))


async def test_a_response_format_holds_for_the_answer_alone(harmony: Stack) -> None:
    schema: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    body = asking(harmony.tokenizer, "Talk.", response_format=form) | {"max_tokens": 100}
    answer = whole(await post(harmony.client, CHAT, body))
    assert joined(await chunks(harmony.client, CHAT, body)) == answer
    Draft202012Validator(schema).validate(orjson.loads(answer["content"]))


async def test_every_dialect_has_reasoning_text_and_calls_apart() -> None:
    says, _ = TABLES["openai"]["preamble and two calls"]
    async with serve(FOLDER / "gpt-oss", chat_template=template("openai")) as stack:
        tokens = asking(stack.tokenizer, says)["max_tokens"]
        tools = [{"name": name, "input_schema": schema} for name, schema in TOOLS.items()]
        body: Json = {"messages": [{"role": "user", "content": says}], "max_tokens": tokens, "tools": tools}
        blocks = (await post(stack.client, "/v1/messages", body))["content"]
        assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use", "tool_use"]
        functions = [{"type": "function", "name": name, "parameters": schema} for name, schema in TOOLS.items()]
        body = {"input": says, "max_output_tokens": tokens, "tools": functions}
        items = (await post(stack.client, "/v1/responses", body))["output"]
        assert [item["type"] for item in items] == ["reasoning", "message", "function_call", "function_call"]
        says, _ = TABLES["openai"]["answer"]
        reply = await post(stack.client, "/vertex", {"instances": [asking(stack.tokenizer, says)]})
        assert reply == {"predictions": ["Hi."]}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def reasoning(demo_model: Path) -> AsyncIterator[Stack]:
    async with serve(demo_model, chat_template=template(""), tool_call_parser="hermes", reasoning=True) as running:
        yield running


@pytest.mark.parametrize(
    ("thought", "says"),
    [
        ("One two three", "Four five six"),
        ("One two three", '<tool_call>{"name": "search", "arguments": {"query": "a"}}</tool_call>'),
        ("One two three", ""),
        ("", "Four"),
    ],
)
async def test_reasoning_tokens_are_counted(reasoning: Stack, thought: str, says: str) -> None:
    stack = reasoning
    end = "</think>" if says else ""
    body = asking(stack.tokenizer, f"<think>{thought}{end}{says}" if thought else says, tools=ASKED)
    usages = [(await post(stack.client, CHAT, body))["usage"]]
    usages.append((await chunks(stack.client, CHAT, body | {"stream_options": {"include_usage": True}}))[-1]["usage"])
    counts = [(usage["completion_tokens"], usage["completion_tokens_details"]["reasoning_tokens"]) for usage in usages]
    tools = [{"type": "function", **tool["function"]} for tool in ASKED]
    body = {"input": body["messages"], "max_output_tokens": body["max_tokens"], "tools": tools}
    usage = (await post(stack.client, "/v1/responses", body))["usage"]
    counts.append((usage["output_tokens"], usage["output_tokens_details"]["reasoning_tokens"]))
    async with stack.client.post("/v1/responses", json=body | {"stream": True}) as response:
        usage = orjson.loads((await response.read()).rstrip().rpartition(b"\ndata: ")[2])["response"]["usage"]
    counts.append((usage["output_tokens"], usage["output_tokens_details"]["reasoning_tokens"]))
    assert len(set(counts)) == 1, counts
    tokens = len(stack.tokenizer.encode_ids(thought, add_special_tokens=False))
    assert tokens <= counts[0][1] <= tokens + bool(thought), "a marker may share a token with the reasoning"


async def test_calls_of_unknown_tools_are_forwarded_if_the_server_is_told_so(demo_model: Path) -> None:
    says = '<tool_call>{"name": "rm", "arguments": {"a": 1}}</tool_call>'
    for marks, setting, calls in (
        ("<tool_call>", True, [{"name": "rm", "arguments": '{"a": 1}'}]),
        ("<tool_call>", False, []),
        ("<|python_tag|>", True, []),
    ):
        settings = {"forward_unknown_tools": setting}
        async with serve(demo_model, chat_template=template("") + f"{{# {marks} #}}", settings=settings) as stack:
            answer = says if marks == "<tool_call>" else says[11:-12]
            body = asking(stack.tokenizer, answer, tools=ASKED)
            assert whole(await post(stack.client, CHAT, body))["tool_calls"] == calls
            body = asking(stack.tokenizer, answer)
            assert whole(await post(stack.client, CHAT, body))["tool_calls"] == []
