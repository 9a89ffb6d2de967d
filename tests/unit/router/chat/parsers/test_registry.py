"""Parsers by name, the format that a template implies, and limits of the held-back text."""

from __future__ import annotations

import pytest

from text_generation_router.chat.events import TextDelta, ToolCallStart
from text_generation_router.chat.parsers import (
    PARSERS,
    ReasoningParser,
    create_parser,
    detect_format,
    starts_in_reasoning,
)
from text_generation_router.chat.parsers.readers import MAX_HELD, MAX_NAME


def test_an_unknown_format_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown tool call format 'xml'; known are hermes, json, .*plain"):
        create_parser("xml", tool_names=())


@pytest.mark.parametrize(
    ("template", "special", "expected"),
    [
        ("{% if tools %}<tool_call>{% endif %}", (), "hermes"),
        ("{{ '[TOOL_CALLS]' }}", (), "mistral"),
        ("<|python_tag|>", (), "llama3_json"),
        ("{% if tools %}", ("<|python_tag|>",), "llama3_json"),
        ("{% if tools %}", ("[TOOL_CALLS]",), "mistral"),
        ("{{ messages }}", ("[TOOL_CALLS]",), "json"),
        ("", (), "json"),
    ],
)
def test_the_template_implies_the_format(template: str, special: tuple[str, ...], expected: str) -> None:
    assert detect_format(template, special) == expected
    assert expected in PARSERS


def test_a_prompt_may_start_the_reasoning() -> None:
    assert starts_in_reasoning("<|assistant|><think>\n")
    assert not starts_in_reasoning("<think>\n\n</think>\n\n")


def test_special_tokens_that_must_be_fed() -> None:
    assert create_parser("mistral", tool_names=()).markers == {"[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"}
    assert create_parser("llama3_json", tool_names=()).markers == {"<|python_tag|>"}
    assert create_parser("plain", tool_names=()).markers == frozenset()
    assert ReasoningParser(create_parser("plain", tool_names=())).markers == {"<think>", "</think>"}


def test_names_have_a_maximum_length() -> None:
    longest = "x" * MAX_NAME
    parser = create_parser("json", tool_names=[longest, longest + "x"])
    assert parser.feed(f'{{"name": "{longest}"') == [ToolCallStart(0, longest)]
    parser = create_parser("json", tool_names=[longest, longest + "x"])
    assert parser.feed(f'{{"name": "{longest}x') == [TextDelta(f'{{"name": "{longest}x')]


def test_held_back_arguments_have_a_maximum_length() -> None:
    parser = create_parser("json", tool_names=["f"])
    started = '{"arguments": {"a": "' + "x" * MAX_HELD
    assert parser.feed(started) == [TextDelta(started)]


def test_whitespace_before_a_call_is_dropped() -> None:
    parser = create_parser("hermes", tool_names=["f"])
    parser.feed(' \n<tool_call>{"name": "f"}')
    assert parser.feed("ok") == [TextDelta("ok")]
