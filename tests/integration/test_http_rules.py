"""TGI's rules and error table over HTTP: the status, text and error type of each cause, and the order of causes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from http_stack import Stack, serve, served

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


stack = served(limits=LIMITS, grammars=True)


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


async def test_nothing_is_left_behind(stack: Stack) -> None:
    async with asyncio.timeout(10):
        await stack.assert_empty()
