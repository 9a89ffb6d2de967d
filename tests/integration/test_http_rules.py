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

Case = tuple[str, dict[str, Any], str]

WHOLE: list[Case] = [
    ("0b", {"best_of": 3}, "`best_of` must be > 0 and <= 2. Given: 3"),
    ("1", {"best_of": 2}, "you must use sampling when `best_of` is > 1"),
    ("2", {"temperature": 0.0}, "`temperature` must be strictly positive"),
    ("3", {"repetition_penalty": 0.0}, "`repetition_penalty` must be strictly positive"),
    ("4", {"frequency_penalty": 2.5}, "`frequency_penalty` must be >= -2.0 and <= 2.0"),
    ("5", {"top_p": 1.0}, "`top_p` must be > 0.0 and < 1.0"),
    ("6", {"typical_p": 1.0}, "`typical_p` must be > 0.0 and < 1.0"),
    ("7", {"top_k": 0}, "`top_k` must be strictly positive"),
    ("8", {"max_new_tokens": 0}, "`max_new_tokens` must be strictly positive"),
    ("9", {"stop": list("abcde")}, "`stop` supports up to 4 stop sequences. Given: 5"),
    ("10", {"best_of": 2, "do_sample": True, "seed": 1}, "`seed` must not be set when `best_of` > 1"),
    ("11", {"top_n_tokens": 6}, "`top_n_tokens` must be >= 0 and <= 5. Given: 6"),
    ("12", {"inputs": ""}, "`inputs` cannot be empty"),
    ("13", {"truncate": 11}, "`truncate` must be strictly positive and less than 10. Given: 11"),
    (
        "15",
        {"max_new_tokens": 16, "inputs": "a b c d e"},
        "`inputs` tokens + `max_new_tokens` must be <= 20. Given: 5 `inputs` tokens and 16 `max_new_tokens`",
    ),
    (
        "15, before 16",
        {"inputs": LONG},
        "`inputs` tokens + `max_new_tokens` must be <= 20. Given: 26 `inputs` tokens and 0 `max_new_tokens`",
    ),
    ("16", {"inputs": FITS_NO_MORE}, "`inputs` must have less than 10 tokens. Given: 11"),
    ("17", {"grammar": {"type": "json", "value": 3}}, "grammar is not supported"),
    ("18", {"grammar": {"type": "json", "value": "{"}}, "grammar is not valid: "),
    (
        "18",
        {"grammar": {"type": "json", "value": {"type": "object"}}},
        "grammar is not valid: Grammar must have a 'properties' field",
    ),
    ("18", {"grammar": {"type": "json", "value": {"type": 3, "properties": {}}}}, "grammar is not valid: "),
    (
        "19",
        {"grammar": {"type": "json", "value": {"properties": {"a": {"$ref": "#"}}}}},
        "cannot compile regex from schema: ",
    ),
]
STREAMED: list[Case] = [
    ("0s", {"best_of": 2}, "`best_of` != 1 is not supported when streaming tokens"),
    ("0s", {"best_of": 0}, "`best_of` != 1 is not supported when streaming tokens"),
    ("0t", {"decoder_input_details": True}, "`decoder_input_details` == true is not supported when streaming tokens"),
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


@pytest.mark.parametrize(("rule", "case", "message"), WHOLE, ids=[f"{rule}-{case}" for rule, case, _ in WHOLE])
async def test_a_broken_rule_is_reported_in_tgis_words(
    stack: Stack, rule: str, case: dict[str, Any], message: str
) -> None:
    text = await refusal(stack, "/generate", case)
    assert matches(text, message), text


@pytest.mark.parametrize(("rule", "case", "message"), STREAMED + WHOLE[-2:], ids=str)
async def test_a_stream_is_refused_with_the_same_text(
    stack: Stack, rule: str, case: dict[str, Any], message: str
) -> None:
    text = await refusal(stack, "/generate_stream", case)
    assert matches(text, message), text


async def test_the_first_of_two_broken_rules_is_reported(stack: Stack) -> None:
    """Each rule with a grammar, the last one. The other pairs: tests/unit/router/api/tgi/test_parameters.py."""
    _, grammar, _ = WHOLE[-1]
    for rule, case, message in WHOLE:
        if "grammar" not in case:
            text = await refusal(stack, "/generate", case | grammar)
            assert matches(text, message), (rule, text)


async def test_a_grammar_is_refused_if_grammars_are_off(demo_model: Path) -> None:
    async with serve(demo_model) as stack:
        told = await refusal(stack, "/generate", {"grammar": {"type": "regex", "value": "a"}})
    assert told == "grammar is not supported"


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}

TABLE: list[tuple[str, dict[str, Any], int, str, str | None]] = [
    ("/v1/completions", {"prompt": "a", "suffix": "b"}, 422, "Suffix is not supported and can be achieved by", None),
    (
        "/v1/completions",
        {"prompt": list("abcde")},
        422,
        "Number of prompts exceeds the maximum allowed batch size of 4",
        "batch_size_exceeded",
    ),
    ("/v1/completions", {"prompt": []}, 422, "Input validation error: Empty array detected.", None),
    (
        "/v1/chat/completions",
        CHAT | {"tools": TOOLS, "response_format": {"type": "json_object"}},
        422,
        "Tool error: Grammar and tools are mutually exclusive",
        "tool_error",
    ),
    (
        "/v1/chat/completions",
        CHAT | {"tools": TOOLS, "tool_choice": "g"},
        422,
        "Tool error: Tool with name g not found",
        "tool_error",
    ),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": LONG}]},
        422,
        "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 20.",
        None,
    ),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        422,
        "Input validation error: image modality is not supported",
        None,
    ),
    ("/v1/chat/completions", {"messages": []}, 422, "Input validation error: `messages` cannot be empty", None),
]


@pytest.mark.parametrize(("path", "body", "status", "message", "code"), TABLE, ids=[row[3] for row in TABLE])
async def test_openais_routes_report_tgis_causes_in_openais_format(
    stack: Stack, path: str, body: dict[str, Any], status: int, message: str, code: str | None
) -> None:
    for stream in (False, True):
        async with stack.client.post(path, json=body | {"stream": stream}) as response:
            told = await response.json()
            assert response.status == status, told
        assert told["error"]["message"].startswith(message)
        assert told["error"]["type"] == "invalid_request_error"
        if code is not None:
            assert told["error"]["code"] == code


async def test_a_template_that_raises_is_a_template_error(demo_model: Path) -> None:
    async with (
        serve(demo_model, chat_template="{{ raise_exception('no such role') }}") as stack,
        stack.client.post("/v1/chat/completions", json=CHAT) as response,
    ):
        assert response.status == 422
        assert (await response.json())["error"] == {
            "message": "Template error: no such role",
            "type": "invalid_request_error",
            "param": None,
            "code": "template_error",
            "http_status_code": 422,
        }


OVERLOADED = [
    ("/generate", {"inputs": "a"}, {"error": "Model is overloaded", "error_type": "overloaded"}),
    ("/generate_stream", {"inputs": "a"}, {"error": "Model is overloaded", "error_type": "overloaded"}),
    (
        "/v1/chat/completions",
        CHAT,
        {
            "error": {
                "message": "Model is overloaded",
                "type": "rate_limit_error",
                "param": None,
                "code": "overloaded",
                "http_status_code": 429,
            }
        },
    ),
    (
        "/v1/messages",
        CHAT | {"max_tokens": 1, "model": "m"},
        {"type": "error", "error": {"type": "rate_limit_error", "message": "Model is overloaded"}},
    ),
]


async def test_without_a_permit_every_dialect_answers_429(demo_model: Path) -> None:
    async with serve(demo_model, max_concurrent_requests=1) as stack:
        with stack.permits.take(1):
            for path, body, expected in OVERLOADED:
                async with stack.client.post(path, json=body) as response:
                    assert (response.status, await response.json()) == (429, expected), path


async def test_a_failed_generation_is_424_before_the_first_token_and_an_event_after_it(demo_model: Path) -> None:
    async with serve(demo_model) as stack:
        failing = (await stack.tokenizer.encode_ids(" fail", add_special_tokens=False))[0]
    async with serve(demo_model, echo_fail_token=failing) as stack:
        async with stack.client.post("/generate", json={"inputs": " fail"}) as response:
            told = await response.json()
            assert (response.status, told["error_type"]) == (424, "generation")
            assert told["error"].startswith("Request failed during generation: ")
        async with stack.client.post("/v1/completions", json={"prompt": "go on fail", "stream": True}) as response:
            lines = [line async for line in response.content if line.strip()]
        assert response.status == 200
        assert b'"code":"generation","http_status_code":424' in lines[-2]
        assert lines[-1] == b"data: [DONE]\n"


async def test_unhealthy_is_503(demo_model: Path) -> None:
    async with serve(demo_model, healthy=lambda: False) as stack, stack.client.get("/health") as response:
        assert (response.status, await response.json()) == (503, {"error": "unhealthy", "error_type": "healthcheck"})


async def test_unreadable_bodies_are_refused_in_plain_text_on_tgis_routes_and_in_json_on_others(stack: Stack) -> None:
    for path, is_json in (("/generate", False), ("/v1/chat/completions", True), ("/v1/messages", True)):
        for sent, status in (
            ({"data": b"{", "headers": {"content-type": "application/json"}}, 400),
            ({"data": b"{}", "headers": {"content-type": "application/json"}}, 422),
            ({"data": b"{}", "headers": {"content-type": "text/plain"}}, 415),
        ):
            async with stack.client.post(path, **sent) as response:  # type: ignore[arg-type]
                assert response.status == status, path
                assert (response.content_type == "application/json") is is_json
                if is_json:
                    assert (await response.json())["error"]["type"] == "invalid_request_error"


async def test_nothing_is_left_behind(stack: Stack) -> None:
    async with asyncio.timeout(10):
        await stack.assert_empty()
