"""Parsers give the same events for every split of an answer, lose nothing, and take linear time on hostile text."""

from __future__ import annotations

import json
import time
from itertools import pairwise

import pytest
from full_grid import full
from hypothesis import given, settings
from hypothesis import strategies as st
from json_call_answers import TOOLS as ANSWERED_TOOLS
from model_answers import TABLES
from parser_events import Call, Part, read_parts

from text_generation_router.chat.events import Event, Kind, OutputParser
from text_generation_router.chat.parsers import FORMATS
from text_generation_router.chat.parsers.base import Tools
from text_generation_router.chat.parsers.reasoning import ReasoningParser

TOOLS: Tools = {
    "get_weather": {},
    "f": {"properties": {"a": {"type": "string"}, "b": {"type": ["object", "array", "integer"]}}},
}
MILLION = 1_000_000

texts = st.text('ab{}[]<>,:"\\\n\t\x00 é\u2028😀', max_size=6)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
objects = st.dictionaries(texts, values, max_size=3)
separators = st.sampled_from([(", ", ": "), (",", ":"), (" ,\n", " :\t")])


@st.composite
def calls(draw: st.DrawFn) -> str:
    """The object of a tool call, mostly well-formed."""
    name = draw(st.sampled_from([*TOOLS, *TOOLS, "unknown"]))
    arguments = draw(objects)
    as_ascii, between = draw(st.booleans()), draw(separators)

    def written(value: object) -> str:
        return json.dumps(value, ensure_ascii=as_ascii, separators=between)

    form = draw(st.sampled_from(["name", "arguments", "string", "null"]))
    key = draw(st.sampled_from(["arguments", "parameters"]))
    value = written(arguments) if form == "string" else None if form == "null" else arguments
    pair = [("name", name), (key, value)]
    return written(dict(reversed(pair) if form == "arguments" else pair))


PIECES = [
    "<think>", "</think>", "```json\n", "```", "[", "]", ", ", ";", "\n", " ", "f", "a", "{", "}", '"', "'", "\\", "<", ">", ":",
    "=", "(", ")", "1", "-", "null", "f(", "a=", "to=functions.f", "analysis", "final", "call:f{", "thought\n", "functions.f:0",
    "f\n", '"f">', "f>", "function", '{"name": "f", "arguments": ',
]  # fmt: skip
SPECIAL = sorted({marker for name in FORMATS for marker in FORMATS[name].parser({}).markers})
chunks = st.sampled_from(PIECES) | st.sampled_from(SPECIAL) | calls() | texts
WRAPPERS = [
    ("", ""), ("<tool_call>\n", "\n</tool_call>"), ("[TOOL_CALLS][", "]"), ("[TOOL_CALLS]f[ARGS]", ""),
    ("```json\n", "\n```"), ("<think>\nhm\n</think>\n", ""), ("<|python_tag|>", ";"),
    ("<tool_call>\n<function=f>\n<parameter=a>\n", "\n</parameter>\n</function>\n</tool_call>"),
    ("<tool_call>f\n<arg_key>b</arg_key>\n<arg_value>", "</arg_value>\n</tool_call>"),
    ('<minimax:tool_call>\n<invoke name="f">\n<parameter name="b">', "</parameter>\n</invoke>\n</minimax:tool_call>"),
    ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n", "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"),
    ("<｜DSML｜tool_calls><｜DSML｜invoke name=\"f\"><｜DSML｜parameter name=\"b\">", "</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜tool_calls>"),
    ("]<]minimax[>[<tool_call>]<]minimax[>[<invoke name=\"f\">]<]minimax[>[<b>", "]<]minimax[>[</b>]<]minimax[>[</invoke>]<]minimax[>[</tool_call>"),
    ("<tool_calls>[", "]</tool_calls>"), ("<|tools_prefix|>[{\"f\": ", "}]<|tools_suffix|>"), ("<function_calls>f(a=", ")\n</function_calls>"),
    ("<|tool_call_start|>[f(a=", ")]<|tool_call_end|>"), ("<start_function_call>call:f{a:", "}<end_function_call>"),
    ("<|tool_call>call:f{a:", "}<tool_call|>"), ("<|channel>thought\n", "\n<channel|>"), ("[f(a=", "), f()]"),
    ("<|channel|>commentary to=functions.f <|constrain|>json<|message|>", "<|call|>"),
    ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"),
]  # fmt: skip


@st.composite
def answers(draw: st.DrawFn) -> str:
    """Answers in any format or none, possibly cut or with one character changed."""
    parts: list[str] = []
    for _ in range(draw(st.integers(0, 4))):
        before, after = draw(st.sampled_from(WRAPPERS))
        parts += [before, draw(chunks), after] if draw(st.booleans()) else [draw(chunks)]
    answer = "".join(parts)
    if answer and draw(st.booleans()):
        answer = answer[: draw(st.integers(0, len(answer)))]
    if answer and draw(st.booleans()):
        at = draw(st.integers(0, len(answer) - 1))
        answer = answer[:at] + draw(st.sampled_from(['"', "{", "}", "\\", "<", "\n", "é", ""])) + answer[at + 1 :]
    return answer


def make(kind: str, tools: Tools = TOOLS) -> OutputParser:
    name, _, reasoning = kind.partition("+")
    parser = FORMATS[name].parser(tools)
    return ReasoningParser(parser, starts_inside=reasoning == "inside") if reasoning else parser


def parts_of(kind: str, pieces: list[str]) -> list[Part]:
    return read_parts(make(kind), pieces)


some = settings(max_examples=settings.default.max_examples // 3)
"""For tests of each format: most of them share their readers."""
KINDS = [*FORMATS, "plain+outside", "hermes+outside", "hermes+inside", "json+outside", "llama3_json+inside"]


@pytest.mark.parametrize("kind", KINDS)
@some
@given(answer=answers(), cuts=st.lists(st.integers(0, 400), max_size=12))
def test_every_cut_of_an_answer_tells_the_same(kind: str, answer: str, cuts: list[int]) -> None:
    edges = [0, *sorted(min(cut, len(answer)) for cut in cuts), len(answer)]
    whole = parts_of(kind, [answer])
    assert parts_of(kind, [answer[a:b] for a, b in pairwise(edges)]) == whole
    assert parts_of(kind, list(answer)) == whole


def without_openings(kind: str, parts: list[Part]) -> str:
    """Return the text without whitespace, tags and, at its end, starts of tags: a parser drops openings of calls."""
    parser = make(kind)
    tags = {"".join(tag.split()) for tag in parser.markers | getattr(parser, "TAGS_OF_CALLS", frozenset())}
    text = "".join("".join(map(str, parts)).split())
    starts = {tag[:end] for tag in tags for end in range(1, len(tag) + 1)}
    while start := next((start for start in starts if text.endswith(start)), ""):
        text = text.removesuffix(start)
    for tag in sorted(tags, key=len, reverse=True):
        text = text.replace(tag, "")
    return text


def assert_text_unless_called(kind: str, answer: str) -> None:
    parts = parts_of(kind, [answer])
    assert any(isinstance(part, Call) for part in parts) or without_openings(kind, parts) == without_openings(
        kind, [answer]
    )


@pytest.mark.parametrize("kind", [name for name, form in FORMATS.items() if not form.has_channels])
@some
@given(answer=answers())
def test_without_a_call_the_answer_is_the_text(kind: str, answer: str) -> None:
    assert_text_unless_called(kind, answer)


@pytest.mark.parametrize("kind", [name for name, form in FORMATS.items() if not form.has_channels])
def test_an_answer_that_ends_in_an_opening_loses_no_text(kind: str) -> None:
    for before, _ in WRAPPERS:
        if any(marker in before for marker in make(kind).markers):
            for end in range(len(before) + 1):
                assert_text_unless_called(kind, f"x{before[:end]}")


FORMS = {
    "hermes": '<tool_call>\n{{"name": "f", "arguments": {0}}}\n</tool_call>',
    "llama3_json": '{{"name": "f", "parameters": {0}}}',
    "mistral": '[TOOL_CALLS][{{"arguments": {0}, "name": "f"}}]',
    "json_calls": '[{{"name": "f", "arguments": {0}}}]',
    "json": '```json\n{{"name": "f", "arguments": {0}}}\n```',
}


@pytest.mark.parametrize("kind", FORMS)
@given(arguments=objects, between=separators, as_string=st.booleans(), ascii_only=st.booleans())
def test_arguments_arrive_as_they_were_written(
    kind: str, arguments: dict[str, object], between: tuple[str, str], as_string: bool, ascii_only: bool
) -> None:
    written = json.dumps(arguments, separators=between, ensure_ascii=ascii_only)
    value = json.dumps(written, ensure_ascii=ascii_only) if as_string else written
    [call] = parts_of(kind, [FORMS[kind].format(value)])
    assert isinstance(call, Call)
    assert json.loads(call.arguments) == arguments
    assert as_string or call.arguments == written


KEYWORDS = [
    "type", "properties", "additionalProperties", "$ref", "$defs", "anyOf", "oneOf", "allOf", "enum", "const", "a", "x",
]  # fmt: skip
NAMED = ["string", "integer", "object", "#/properties/a", "#/$defs/x", "#/"]
schemas = st.recursive(
    st.none() | st.booleans() | st.sampled_from(NAMED) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYWORDS), inner, max_size=4),
    max_leaves=12,
)
FORMS_OF_TEXT = {
    "qwen3_coder": ("<tool_call><function=f><parameter=a>", "</parameter></function></tool_call>"),
    "glm45": ("<tool_call>f<arg_key>a</arg_key><arg_value>", "</arg_value></tool_call>"),
}


@pytest.mark.parametrize("form", FORMS_OF_TEXT)
@given(
    schema=st.dictionaries(st.sampled_from(["properties", "$ref", "additionalProperties", "$defs"]), schemas),
    value=texts | values,
)
def test_arguments_are_json_under_any_schema(form: str, schema: dict[str, object], value: object) -> None:
    """A client's schema reaches the parser as it is, if the model may choose to call."""
    written = value if isinstance(value, str) else json.dumps(value)
    before, after = FORMS_OF_TEXT[form]
    parser = FORMATS[form].parser({"f": schema})
    [call] = read_parts(parser, [f"{before}{written}{after}"])
    assert isinstance(call, Call)
    [key] = json.loads(call.arguments)
    assert key == "a"


HOSTILE = {
    "half a marker": "<tool_call",
    "markers": "<tool_call>",
    "markers with an object": '<tool_call>{"',
    "objects": '{"',
    "nesting": '{"a":',
    "thoughts": "<think><think>",
    "ends": "</think",
    "arrays": "[TOOL_CALLS][",
    "names": "[TOOL_CALLS]f]",
    "calls": '<tool_call>{"name":"f"',
    "escapes": "\\",
    "blanks": " \n",
    "fences": "```",
}
BEFORE = {
    "hermes": '<tool_call>{"name":"f","arguments":{"a":"',
    "hermes+outside": "",
    "mistral": "[TOOL_CALLS]",
    "json": '{"arguments":"{\\"a\\":\\"',
    "json_calls": '{"function":{"a":"',
    "llama3_json+inside": "",
}
HOSTILE_BY_FORMAT = {
    "qwen3_coder": ("<function=f><parameter=a>", ("</function>\n", "</function>", "</para", "\n", "<parameter=a>")),
    "glm45": ("<tool_call>f<arg_key>b</arg_key><arg_value>[", ("</arg", "<arg_key>", "[", "1,")),
    "deepseek_v3": ("<｜tool▁call▁begin｜>", ("<｜tool▁sep｜>", "f{", "x")),
    "gemma4": ("<|tool_call>call:f{a:", ('<|"', "[", '<|"|>', "1")),
    "llama4_pythonic": ("[f(a=", ("'", "\\", "(", "1")),
    "minimax_m3": ('<invoke name="f">', ("]<]minimax[>[<b>", "]<]minimax[>[</", "]<]minimax")),
    "openai": ("<|channel|>", ("<|channel|>", "x", "<|message|>", "<|start|>", "\n")),
}
FLOODS = [
    # Each text in a quarter of the formats, each format with a quarter of the texts.
    *(
        full(kind, before, unit) if (row + column) % 4 else (kind, before, unit)
        for row, (kind, before) in enumerate(BEFORE.items())
        for column, unit in enumerate(HOSTILE.values())
    ),
    *(
        full(kind, before, unit) if column % 2 else (kind, before, unit)
        for kind, (before, units) in HOSTILE_BY_FORMAT.items()
        for column, unit in enumerate(units)
    ),
]


@pytest.mark.parametrize(("kind", "before", "unit"), FLOODS)
def test_a_hostile_answer_takes_linear_time(kind: str, before: str, unit: str) -> None:
    """Quadratic work takes minutes at this length; the bound allows for a slow machine."""
    answer = before + unit * (MILLION // 8 // len(unit))
    for pieces in (list(answer), [answer]):
        parser = make(kind)
        began = time.thread_time()
        for piece in pieces:
            parser.feed(piece)
        parser.finish()
        assert time.thread_time() - began < 4


@pytest.mark.parametrize("name", [name if name in ("glm45", "openai") else full(name) for name in FORMATS])
def test_the_time_grows_with_the_length(name: str) -> None:
    """Long runs of each marker: a parser that looked for the end of each would take many seconds."""
    whole, _ = next(iter(TABLES[name].values()))
    for marker in (*sorted(make(name).markers), "<", " ", "{"):
        for before in ("", whole[:-40]):
            parser, began = make(name, ANSWERED_TOOLS), time.thread_time()
            parser.feed(before + marker * (MILLION // len(marker)))
            parser.finish()
            assert time.thread_time() - began < 2.5, (before, marker)


def test_a_name_too_long_is_text_up_to_its_limit_however_it_is_cut() -> None:
    call = "<tool_call>f<arg_key>a</arg_key><arg_value>x</arg_value></tool_call>"
    for text in (f"<tool_call>{'a' * 300}{call}", f"<tool_call>f<arg_key>{'a' * 300}{call}</arg_key>"):
        whole = parts_of("glm45", [text])
        assert parts_of("glm45", list(text)) == whole
        assert ("f", '{"a": "x"}') in whole


def test_text_and_arguments_come_while_they_are_written() -> None:
    parser = make("hermes")
    assert parser.feed("Hello <") == [Event(Kind.TEXT, "Hello ")]
    assert parser.feed('tool_call>{"name": "f') == []
    assert parser.feed('", "arg') == [Event(Kind.CALL, "f")]
    assert parser.feed('uments": {"a": 1') == [Event(Kind.ARGUMENTS, '{"a": 1')]
    assert parser.feed("}}") == [Event(Kind.ARGUMENTS, "}")]


@pytest.mark.parametrize(
    ("kind", "before"),
    [
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>\n"),
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=c>\nno"),
        ("glm45", "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>"),
        ("minimax_m2", '<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">'),
        ("seed_oss", "<seed:tool_call>\n<function=f>\n<parameter=a>\n"),
        ("hy_v3", "<tool_calls><tool_call>f<tool_sep><arg_key>a</arg_key><arg_value>"),
        ("deepseek_v32", '<｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="true">'),
        ("minimax_m3", ']<]minimax[>[<invoke name="f">]<]minimax[>[<a>'),
        ("functiongemma", "<start_function_call>call:f{a:<escape>"),
        ("olmo3", "<function_calls>f(a='x"),
        ("apertus", '<|tools_prefix|>[{"f": {"a": "'),
        ("cohere_command", '<|START_ACTION|>[{"tool_name": "f", "parameters": {"a": "'),
        ("deepseek_v3", '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": "'),
        ("kimi_k2", '<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": "'),
        ("gemma4", '<|tool_call>call:f{a:<|"|>'),
        ("llama4_pythonic", "[f(a='x"),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a": "'),
        ("openai", '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": "'),
    ],
)
def test_every_format_streams_a_text_argument(kind: str, before: str) -> None:
    parser = make(kind)
    assert Event(Kind.CALL, "f") in parser.feed(before)
    assert parser.feed("New ") == [Event(Kind.ARGUMENTS, "New ")]
    assert parser.feed("York") == [Event(Kind.ARGUMENTS, "York")]
