"""TGI's rules and error table over HTTP: the status, text and error type of each cause, and the order of causes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from http_stack import Stack, serve

from text_generation_router.api.core.settings import Limits

LIMITS = Limits(max_best_of=2, max_stop_sequences=4, max_top_n_tokens=5, max_input_tokens=10, max_total_tokens=20)
LONG = "a b c d e f g h i j k l m n o p q r s t u v w x y z"
FITS_NO_MORE = "a b c d e f g h i j k"
"""Eleven tokens: too many for a prompt, few enough for a request."""

Case = tuple[dict[str, Any], str]

WHOLE: list[Case] = [
    ({"best_of": 2}, "you must use sampling when `best_of` is > 1"),
    ({"temperature": 0.0}, "`temperature` must be strictly positive"),
    ({"inputs": ""}, "`inputs` cannot be empty"),
    ({"inputs": LONG}, "`inputs` tokens + `max_new_tokens` must be <= 20. Given: 26 `inputs` tokens and 0 `max_new_tokens`"),
    ({"inputs": FITS_NO_MORE}, "`inputs` must have less than 10 tokens. Given: 11"),
    ({"grammar": {"type": "json", "value": 3}}, "grammar is not supported"),
    ({"grammar": {"type": "json", "value": {"type": "object"}}}, "grammar is not valid: Grammar must have a 'properties' field"),
    ({"grammar": {"type": "json", "value": {"type": 3, "properties": {}}}}, "grammar is not valid: "),
    ({"grammar": {"type": "json", "value": {"properties": {"a": {"$ref": "#"}}}}}, "cannot compile regex from schema: "),
    ({"repetition_penalty": 1e-38}, "`repetition_penalty` must be >= 1e-06. Given: 1e-38"),
]  # fmt: skip
"""A case of each stage of the checks. All rules: tests/unit/router/api/tgi/test_parameters.py."""
STREAMED: list[Case] = [
    ({"best_of": 2}, "`best_of` != 1 is not supported when streaming tokens"),
    ({"decoder_input_details": True}, "`decoder_input_details` == true is not supported when streaming tokens"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(demo_model: Path) -> AsyncIterator[Stack]:
    async with serve(demo_model, limits=LIMITS, grammars=True) as running:
        yield running


pytestmark = pytest.mark.asyncio(loop_scope="module")


def body_of(case: dict[str, Any]) -> dict[str, Any]:
    return {
        "inputs": case.get("inputs", "Hello"),
        "parameters": {name: value for name, value in case.items() if name != "inputs"},
    }


async def refusal(stack: Stack, path: str, case: dict[str, Any]) -> str:
    """Return the error text of a request without TGI's prefix; check its status and type."""
    async with stack.client.post(path, json=body_of(case)) as response:
        told = await response.json()
        assert (response.status, response.content_type) == (422, "application/json"), told
    assert set(told) == {"error", "error_type"}
    assert told["error_type"] == "validation"
    assert told["error"].startswith("Input validation error: ")
    return str(told["error"]).removeprefix("Input validation error: ")


def matches(told: str, message: str) -> bool:
    """Compare texts. One that ends in a colon continues with the library's own words."""
    return told.startswith(message) and len(told) > len(message) if message.endswith(": ") else told == message


@pytest.mark.parametrize(
    ("path", "case", "message"),
    [("/generate", *case) for case in WHOLE] + [("/generate_stream", *case) for case in STREAMED + WHOLE[-2:]],
    ids=str,
)
async def test_a_broken_rule_is_reported_in_tgis_words(
    stack: Stack, path: str, case: dict[str, Any], message: str
) -> None:
    text = await refusal(stack, path, case)
    assert matches(text, message), text


async def test_a_grammar_is_refused_if_grammars_are_off(demo_model: Path) -> None:
    async with serve(demo_model) as stack:
        told = await refusal(stack, "/generate", {"grammar": {"type": "regex", "value": "a"}})
    assert told == "grammar is not supported"


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
ALLOWED = {
    "type": "allowed_tools",
    "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "g"}}]},
}
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}

LONG_CHAT = {"messages": [{"role": "user", "content": LONG}]}
IMAGE = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}
JSON_OBJECT = {"response_format": {"type": "json_object"}}
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
TABLE: list[tuple[str, dict[str, Any], str, str | None]] = [
    (COMPLETIONS, {"prompt": "a", "suffix": "b"}, "Suffix is not supported and can be achieved by", "unsupported_parameter"),
    (COMPLETIONS, {"prompt": ["a"] * 129}, "Number of prompts exceeds the maximum allowed batch size of 128", "batch_size_exceeded"),
    (COMPLETIONS, {"prompt": []}, "Input validation error: Empty array detected.", None),
    (CHATS, CHAT | {"tools": TOOLS, "ebnf": "root ::= [a-z]"}, "Tool error: Grammar and tools are mutually exclusive, unless the grammar is", "tool_error"),
    (CHATS, CHAT | {"tools": TOOLS, "tool_choice": "g"}, "Tool error: Tool with name g not found", "tool_error"),
    (CHATS, CHAT | {"tools": TOOLS, "tool_choice": ALLOWED}, "Input validation error: `tool_choice` requires a call, but there are no `tools` for it", "invalid_value"),
    (CHATS, LONG_CHAT, "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 20.", "context_length_exceeded"),
    (CHATS, IMAGE, "Input validation error: image modality is not supported", None),
    (CHATS, CHAT | {"max_tokens": 0}, "Input validation error: `max_tokens` must be strictly positive", None),
    (CHATS, CHAT | {"max_completion_tokens": 0}, "Input validation error: `max_completion_tokens` must be", None),
    (CHATS, CHAT | {"top_logprobs": 21}, "Input validation error: `top_logprobs` must be >= 0 and <= 20. Given: 21", None),
    ("/v1/responses", {"input": "a", "max_output_tokens": 0}, "Input validation error: `max_output_tokens` must be", None),
    (CHATS, CHAT | {"function_call": {"name": "g"}}, "Input validation error: `function_call` names the function 'g'", None),
    (CHATS, CHAT | {"max_completion_tokens": 2, "min_tokens": 3}, "Input validation error: `min_tokens` must be <= `max_completion_tokens`. Given: 3 and 2", None),
    (CHATS, {"messages": []}, "Input validation error: `messages` cannot be empty", None),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "message", "code"), TABLE, ids=[row[2] for row in TABLE])
async def test_openais_routes_report_tgis_causes_in_openais_format(
    stack: Stack, path: str, body: dict[str, Any], message: str, code: str | None
) -> None:
    for stream in (False, True):
        async with stack.client.post(path, json=body | {"stream": stream}) as response:
            reply = await response.json()
            assert response.status == 400, reply
        assert reply["error"]["message"].startswith(message)
        assert reply["error"]["type"] == "invalid_request_error"
        assert code in (None, reply["error"]["code"])


async def test_nothing_is_left_behind(stack: Stack) -> None:
    async with asyncio.timeout(10):
        await stack.assert_empty()
