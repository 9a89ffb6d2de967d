"""Parsers by name, the format that a template implies, and limits of the held-back text."""

from __future__ import annotations

from typing import get_args

import pytest
from json_call_answers import TOOLS
from model_answers import TABLES
from parser_events import Call, read_parts

from text_generation_router.chat.events import Event, Kind
from text_generation_router.chat.parsers import FORMATS, NAMES, begun_answer, detect_format, detect_reasoning
from text_generation_router.chat.parsers.base import AnyTools
from text_generation_router.chat.parsers.readers import MAX_HELD, MAX_NAME
from text_generation_router.chat.parsers.reasoning import ReasoningParser
from text_generation_router.config import ToolCallFormat


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
        ("<tool_call>\\n<function=", (), "qwen3_coder"),
        ("<tool_call><arg_key>", ("<tool_call>",), "glm45"),
        ("<｜tool▁calls▁begin｜>", ("<tool_call>",), "deepseek_v3"),
        ("<|start|>assistant<|channel|>", (), "openai"),
        ("{% if tools %}", ("<|channel|>", "<|message|>"), "openai"),
        ("{% if tools %}", ("<|tool_call>",), "gemma4"),
        ("{% if tools %}", ("<|python_start|>",), "llama4_pythonic"),
        ("<minimax:tool_call>", (), "minimax_m2"),
        ("]<]minimax[>[<tool_call>", (), "minimax_m3"),
        ("<|tool_call|>", (), "granite"),
        ("{% if tools %}", ("<|tool_call|>", "<|/tool_call|>"), "phi4_mini_json"),
        ("functools[", (), "phi4_mini_json"),
        ('<tool_calls>[{"name"', (), "hunyuan_a13b"),
        ("<tool_calls><tool_call><tool_sep><arg_key>", (), "hy_v3"),
        ("{% set toolsep_token = '<tool_sep{}>'.format(HYTK) %}", (), "hy_v3"),
        ("{% set dsml_token = '｜DSML｜' %}{{ '<' + dsml_token + 'tool_calls>' }}", (), "deepseek_v4"),
        ("<|tools_prefix|>", (), "apertus"),
        ("<|START_ACTION|>", (), "cohere_command"),
        ("<|tool_call_start|>", (), "lfm2"),
        ("<function_calls>", (), "olmo3"),
        ("<start_function_call>", (), "functiongemma"),
        ("<｜DSML｜function_calls>", (), "deepseek_v32"),
        ("<｜DSML｜tool_calls>", (), "deepseek_v4"),
        ("{% if tools %}", ("｜DSML｜",), "deepseek_v32"),
    ],
)
def test_the_template_implies_the_format(template: str, special: tuple[str, ...], expected: str) -> None:
    assert detect_format(template, special) == expected
    assert expected in FORMATS


@pytest.mark.parametrize("name", [name for name, form in FORMATS.items() if "unknown tool" in TABLES.get(name, {})])
def test_calls_of_unknown_tools_are_calls_if_every_name_is_a_tools(name: str) -> None:
    answer, _ = TABLES[name]["unknown tool"]
    parts = read_parts(FORMATS[name].parser(AnyTools(TOOLS)), answer)
    assert [part.name for part in parts if isinstance(part, Call)][-1] == "rm"
    spaced = read_parts(FORMATS[name].parser(AnyTools(TOOLS)), answer.replace("rm", "r m"))
    assert not any(isinstance(part, Call) and " " in part.name for part in spaced)


def test_a_flag_takes_every_name_of_a_format() -> None:
    internal = {"json_calls", "plain"}
    assert {"auto", *NAMES} - internal == set(get_args(ToolCallFormat))


def test_the_template_or_the_tokens_imply_the_markers_of_reasoning() -> None:
    assert detect_reasoning("[THINK]", ()) == detect_reasoning("", ("[THINK]",)) == ("[THINK]", "[/THINK]")
    assert detect_reasoning("<think>", ()) == ("<think>", "</think>")


def test_an_answer_may_begin_in_the_prompt() -> None:
    start = "<|start|>assistant"
    assert (
        begun_answer(f"{start}<|channel|>final<|message|>a<|end|>{start}<|channel|>final", start) == "<|channel|>final"
    )
    assert begun_answer("Hello", start) == begun_answer("Hello", "") == ""


def test_special_tokens_that_must_be_fed() -> None:
    assert FORMATS["mistral"].parser({}).markers == {"[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"}
    assert FORMATS["llama3_json"].parser({}).markers == {"<|python_tag|>"}
    assert FORMATS["plain"].parser({}).markers == frozenset()
    assert ReasoningParser(FORMATS["plain"].parser({})).markers == {"<think>", "</think>"}


def test_names_have_a_maximum_length() -> None:
    longest = "x" * MAX_NAME
    parser = FORMATS["json"].parser({longest: {}, longest + "x": {}})
    assert parser.feed(f'{{"name": "{longest}"') == [Event(Kind.CALL, longest)]
    parser = FORMATS["json"].parser({longest: {}, longest + "x": {}})
    assert parser.feed(f'{{"name": "{longest}x') == [Event(Kind.TEXT, f'{{"name": "{longest}x')]


def test_held_back_arguments_have_a_maximum_length() -> None:
    parser = FORMATS["json"].parser({"f": {}})
    started = '{"arguments": {"a": "' + "x" * MAX_HELD
    assert parser.feed(started) == [Event(Kind.TEXT, started)]
