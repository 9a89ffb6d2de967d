"""The proof of grammars: refusals by name, schemas that pass, and texts that tool grammars allow."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLTokenizer

from text_generation_common.grammar_tokenizer import compiled, load_tokenizer
from text_generation_proto.values import Grammar, GrammarKind
from text_generation_router.chat.conversation import Tool
from text_generation_router.errors import InvalidRequest
from text_generation_router.grammar.forms import choice_grammar, regex_grammar, schema_grammar
from text_generation_router.grammar.proof import compile_job, prove
from text_generation_router.grammar.schema import read_schema
from text_generation_router.grammar.tools import MAX_TOOLS, auto_tools, forced_tools
from text_generation_router.text.tokenizer import Tokenizer

Json = dict[str, Any]
PROMPTLY_S = 0.5

WEATHER = Tool(
    "get_weather",
    "Weather of a city.",
    {
        "type": "object",
        "properties": {"city": {"$ref": "#/$defs/City"}, "unit": {"enum": ["c", "f"]}},
        "required": ["city"],
        "$defs": {"City": {"type": "string", "title": "City"}},
    },
)
CLOCK = Tool("get_time")
CALL = '{"name": "get_weather", "arguments": {"city": "Paris"}}'


@pytest.fixture(scope="module")
def tokenizer(demo_model: Path) -> LLTokenizer:
    return LLTokenizer(str(demo_model / "tokenizer.json"))


def allows(grammar: Grammar, text: str, tokenizer: LLTokenizer) -> bool:
    """True if the grammar allows `text` as a whole answer."""
    matcher = compiled(grammar, tokenizer)
    return bool(matcher.consume_tokens(tokenizer.tokenize_str(text)) and matcher.is_accepting())


def refusal(grammar: Grammar, tokenizer: LLTokenizer) -> str:
    with pytest.raises(InvalidRequest) as caught:
        prove(grammar, tokenizer)
    return str(caught.value).removeprefix("Input validation error: ")


def holding(inner: object) -> Json:
    return {"type": "object", "properties": {"x": inner}, "required": ["x"]}


def nested(keyword: str, depth: int) -> Json:
    schema: Json = {"type": "string"}
    for kind in range(depth):
        schema = {keyword: [schema, holding({"const": kind})]}
    return schema


def deep(levels: int) -> Json:
    schema: Json = {}
    for _ in range(levels):
        schema = {"properties": schema}
    return schema


RECURSIVE = "recursive references are not supported"
REFUSED = [
    (holding({"$ref": "#"}), RECURSIVE),
    ({"$ref": "#/$defs/a", "$defs": {"a": holding({"$ref": "#/$defs/a"})}}, RECURSIVE),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"anyOf": [{"$ref": "#/$defs/a"}]}}}, RECURSIVE),
    (holding({"$ref": "#/properties/x"}), RECURSIVE),
    (holding({"$ref": "https://example.org/schema"}), "only references into the schema itself"),
    (holding({"$ref": "#anchor"}), "only references into the schema itself"),
    (holding({"$ref": "#/$defs/none"}), "points at no schema"),
    (holding({"$ref": "#/properties"}), "points at no schema"),
    ({"properties": {"a": {"const": {"type": "string"}}, "b": {"$ref": "#/properties/a/const"}}}, "points at no schema"),
    (holding({"multipleOf": 573_720}), "`multipleOf` is more than"),
    ({"type": "array", "minItems": 10_001}, "`minItems` is more than 10000"),
    (holding({"type": "string", "format": "regex"}), "the format 'regex' is not supported"),
    ({"properties": {"\U0004ceee": {}}, "required": ["\U0004ceee"]}, "the model has no tokens for a character of it"),
    ({"enum": [*map(str, range(1_000)), "a\U0004ceee"]}, "the model has no tokens for a character of it"),
    (nested("oneOf", 12), "`oneOf` is supported where its schemas exclude each other"),
    (holding({"$id": "https://example.org/inner", "$ref": "#/$defs/a"}) | {"$defs": {"a": {}}}, "the keyword `$id`"),
    (deep(65), "levels deep"),
    (deep(100_000), "levels deep"),
    ({"enum": list(range(9000))}, "more than 8000 values"),
    ({"description": "x" * 5_000_000}, "longer than"),
    ('{"description": "' + "x" * 5_000_000 + '"}', "longer than"),
    *[
        (holding({keyword: value}), f"the keyword `{keyword}` is not supported")
        for keyword, value in (
            ("uniqueItems", True), ("not", {}), ("contains", {}), ("dependentRequired", {"a": ["b"]}),
            ("propertyNames", {"maxLength": 3}), ("$dynamicRef", "#a"),
        )
    ],
    (holding({"if": {}, "then": {}}), "the keyword `if`"),
    ({"allOf": [{}], "unevaluatedProperties": False}, "the keyword `unevaluatedProperties`"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "reason"), REFUSED, ids=[reason for _, reason in REFUSED])
def test_a_schema_that_cannot_be_enforced_is_refused_by_name_at_once(
    schema: object, reason: str, tokenizer: LLTokenizer
) -> None:
    start = time.thread_time()
    with pytest.raises(InvalidRequest) as caught:
        prove(schema_grammar(read_schema(schema)), tokenizer)
    assert time.thread_time() - start < PROMPTLY_S
    assert str(caught.value).startswith("Input validation error: cannot compile regex from schema: ")
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "strin"}, {"properties": []}, {"properties": {"a": 5}}, {"required": "a"}, {"items": 5}, {"anyOf": []},
        {"anyOf": {}}, {"minLength": -1}, {"type": ["string", "string"]}, {"$defs": {"a": {"type": 5}}}, {"maxItems": "3"},
        {"pattern": 5}, {"enum": 5}, {"patternProperties": 7}, {"additionalProperties": "no"}, {"allOf": [True, 3]},
        {"title": 5}, {"if": 3}, {"properties": {"a": {"readOnly": "yes"}}}, {"then": None}, {"uniqueItems": 1},
    ],
)  # fmt: skip
def test_a_schema_that_breaks_the_meta_schema_is_not_valid(schema: Json, tokenizer: LLTokenizer) -> None:
    assert refusal(schema_grammar(read_schema(schema)), tokenizer).startswith("grammar is not valid: ")


@pytest.mark.parametrize(
    "schema",
    [
        nested("anyOf", 12),
        {"anyOf": [{"const": value} for value in range(500)]},
        {"enum": list(range(5000))},
        {"$ref": "#/components/schemas/A", "components": {"schemas": {"A": {"type": "object"}}}},
        {"properties": {"a/b": {"type": "null"}, "c": {"$ref": "#/properties/a~1b"}}},
        {"properties": {"oneOf": {"const": {"$ref": "#"}}, "$ref": {"type": "string"}, "not": {"enum": [{"not": 1}]}}},
        {"$defs": {"unused": {"not": {}}}, "type": "object"},
        {"type": "object", "minProperties": 2},
        holding({"type": "array", "items": [{"type": "string"}, {"type": "number"}], "minItems": 2, "maxItems": 2}),
        {
            "oneOf": [holding({"const": "a"}), {"properties": {"x": {"const": "b"}}}],
            "discriminator": {"propertyName": "x"},
        },
        holding({"multipleOf": 0.01}),
        holding({"type": "string", "pattern": "^(a+)+$"}),
        holding(
            {"enum": [8.872242510096025e-11, 2**64, 0.1, -273.15, 6.62607015e-20, 1234567.125, 1e15, 6.62607015e-34]}
        ),
        {},
    ],
)
def test_ordinary_schemas_pass(schema: Json, tokenizer: LLTokenizer) -> None:
    prove(schema_grammar(read_schema(schema)), tokenizer)


@pytest.mark.parametrize(
    ("pattern", "fitting", "others"),
    [
        ('^[^"]*$', ["a", "é\n", "\\"], ['"', 'a"b']),
        (r"^[^/\\]+$", ["a.b", '"'], ["\\", "a\\b"]),
        ("^[^-a]$", ["b", "\t"], ["-", "a"]),
        ("^[^]a]$", ["b"], ["]", "a"]),
        (r'^\[[^"]$', ["[a"], ['["', "a"]),
    ],
)
def test_a_negated_class_excludes_what_json_escapes(
    pattern: str, fitting: list[str], others: list[str], tokenizer: LLTokenizer
) -> None:
    by_value = schema_grammar({"type": "string", "pattern": pattern})
    by_key = schema_grammar(
        {"type": "object", "patternProperties": {pattern: {"const": 1}}, "additionalProperties": False}
    )
    for text in fitting + others:
        assert allows(by_value, json.dumps(text, ensure_ascii=False), tokenizer) == (text in fitting)
        assert allows(by_key, json.dumps({text: 1}, ensure_ascii=False), tokenizer) == (text in fitting)


def test_one_of_needs_schemas_that_exclude_each_other(tokenizer: LLTokenizer) -> None:
    def one_of(*schemas: Json) -> Grammar:
        return schema_grammar(read_schema({"oneOf": list(schemas)}))

    def kind(name: str) -> Json:
        return {"type": "object", "properties": {"kind": {"const": name}}, "required": ["kind"]}

    prove(one_of({"type": "string"}, {"type": "integer"}), tokenizer)
    prove(one_of(kind("a"), kind("b"), {"type": "null"}), tokenizer)
    for overlapping in (({"type": "number"}, {"type": "integer"}), (kind("a"), {"type": "object"})):
        assert refusal(one_of(*overlapping), tokenizer) == (
            "cannot compile regex from schema: `oneOf` is supported where its schemas exclude each other, by type or by a "
            "required constant"
        )


def test_the_lenient_option_of_the_engine_has_no_effect(tokenizer: LLTokenizer) -> None:
    """Not even by a text that did not go through `normalize`."""
    schema = {"x-guidance": {"lenient": True}, "oneOf": [{"type": "number"}, {"type": "integer"}]}
    assert "oneOf" in refusal(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)), tokenizer)


@pytest.mark.parametrize("expression", ["(?=x)y", r"(a)\1", "[", "(" * 4000, r"\bx"])
def test_an_expression_that_is_not_supported_is_not_valid(expression: str, tokenizer: LLTokenizer) -> None:
    reason = refusal(regex_grammar(expression), tokenizer)
    assert reason.startswith("grammar is not valid: ")
    assert "\n" not in reason


def test_a_slow_compile_and_a_slow_step_are_refused(tokenizer: LLTokenizer) -> None:
    many = {"type": "object", "properties": {f"name{number}": {"type": "string"} for number in range(3500)}}
    reason = refusal(schema_grammar(read_schema(many)), tokenizer)
    assert reason == "cannot compile regex from schema: it takes too long to compile"
    reason = refusal(regex_grammar("(a{100}){190}"), tokenizer)
    assert reason == "cannot compile regex from schema: it takes too long to follow"


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("(.*a.{40}){3}", "too many states"),
        ("a{9999999}", "too many expressions"),
        ("((a{30}){30}){30}", "takes too long"),
    ],
)
def test_an_automaton_that_explodes_is_refused(expression: str, reason: str, tokenizer: LLTokenizer) -> None:
    assert reason in refusal(regex_grammar(expression), tokenizer)


def test_anchors_around_an_expression_are_removed() -> None:
    bodies = {"^a$": "a", r"a\$": r"a\$", r"a\\$": r"a\\", "^": "", "a^b$c": "a^b$c"}
    assert {expression: regex_grammar(expression).text for expression in bodies} == bodies


def test_choices_are_texts_and_no_expressions(tokenizer: LLTokenizer) -> None:
    grammar = choice_grammar(["a+ b", "x|y", "ü-<1>\n"])
    prove(grammar, tokenizer)
    assert [allows(grammar, text, tokenizer) for text in ("a+ b", "x|y", "ü-<1>\n", "aa b", "x", "")] == [True] * 3 + [
        False
    ] * 3


def test_a_named_tool_must_be_called_with_what_its_schema_says(tokenizer: LLTokenizer) -> None:
    grammar = forced_tools([WEATHER])
    prove(grammar, tokenizer)
    assert allows(grammar, CALL, tokenizer)
    assert not allows(grammar, CALL.replace("get_weather", "get_time"), tokenizer)
    assert not allows(grammar, '{"name": "get_weather", "arguments": {}}', tokenizer)
    assert not allows(grammar, '{"name": "get_weather", "arguments": {"city": 5}}', tokenizer)


def test_one_of_the_tools_must_be_called(tokenizer: LLTokenizer) -> None:
    grammar = forced_tools([WEATHER, CLOCK])
    prove(grammar, tokenizer)
    assert allows(grammar, CALL, tokenizer)
    assert allows(grammar, '{"name": "get_time", "arguments": {}}', tokenizer)
    assert not allows(grammar, '{"name": "get_time", "arguments": {"city": "Paris"}}', tokenizer)


def test_arguments_are_an_object_also_if_the_schema_has_no_type(tokenizer: LLTokenizer) -> None:
    grammar = forced_tools([Tool("f", None, {"properties": {"x": {"type": "integer"}}})])
    assert allows(grammar, '{"name": "f", "arguments": {"x": 1}}', tokenizer)
    assert not allows(grammar, '{"name": "f", "arguments": 1}', tokenizer)
    with pytest.raises(InvalidRequest, match="the parameters of tool f must be an object"):
        forced_tools([Tool("f", None, {"type": "string"})])


def test_there_is_a_limit_to_tools() -> None:
    many = [Tool(f"f{number}") for number in range(MAX_TOOLS + 1)]
    forced_tools(many[:-1])
    for make in (forced_tools, lambda tools: auto_tools(tools, "<", ">", {})):
        with pytest.raises(InvalidRequest, match=r": at most 128 tools are supported\. Given: 129$"):
            make(many)


def test_tools_too_large_together_are_refused_before_any_of_them_is_read() -> None:
    """Each is small enough; all together take seconds to read."""
    parameters: Json = {"properties": {f"p{number}": {"type": "string", "title": "x"} for number in range(1999)}}
    tools = [Tool(f"f{number}", None, parameters) for number in range(MAX_TOOLS)]
    start = time.thread_time()
    with pytest.raises(InvalidRequest, match="the schema has more than 8000 values"):
        forced_tools(tools)
    assert time.thread_time() - start < 0.05


def test_a_recursive_tool_is_refused(tokenizer: LLTokenizer) -> None:
    tool = Tool("f", None, {"type": "object", "properties": {"x": {"$ref": "#"}}})
    for grammar in (forced_tools([tool]), auto_tools([tool], "<tool_call>", "</tool_call>", {})):
        assert "recursive" in refusal(grammar, tokenizer)


@pytest.mark.parametrize(("begin", "end"), [("<tool_call>\n", "\n</tool_call>"), ('a "quote"', "")])
def test_free_text_may_contain_calls(begin: str, end: str, tokenizer: LLTokenizer) -> None:
    grammar = auto_tools([WEATHER, CLOCK], begin, end, {})
    prove(grammar, tokenizer)
    call = begin + CALL + end
    for text in ("", "Hello <b>there</b>.\n", call, f"So: {call} and {call}\nDone.", begin[:-1]):
        assert allows(grammar, text, tokenizer), text
    for text in (begin, f"{begin}Hello{end}", call.replace("get_weather", "rm"), call.replace('"Paris"', "1")):
        assert not allows(grammar, text, tokenizer), text


def test_free_text_may_contain_calls_where_their_markers_are_tokens_of_their_own() -> None:
    """Qwen3's markers are tokens that llguidance takes for special, and tokenizers does not."""
    folder = Path(__file__).parents[3] / "corpus/tokenizers/qwen3"
    markers = Tokenizer.load(folder).markers
    assert {"<tool_call>", "</tool_call>", "<think>", "</think>", "<|im_end|>"} <= markers.keys()
    tokenizer = load_tokenizer((folder / "tokenizer.json").read_text(encoding="utf-8"))
    grammar = auto_tools([WEATHER], "<tool_call>\n", "\n</tool_call>", markers, ("<think>", "</think>"))
    prove(grammar, tokenizer)
    call = f"<tool_call>\n{CALL}\n</tool_call>"
    for text in ("Hello", f"<think>So.</think>\n\n{call}", f"So: {call}\n{call}"):
        assert allows(grammar, text, tokenizer), text
    for text in (call.replace("Paris", '"'), "<tool_call>\n", "<|im_end|>Hello"):
        assert not allows(grammar, text, tokenizer), text


def test_the_result_of_the_job_is_empty_or_tgis_text(demo_model: Path) -> None:
    job = compile_job({"tokenizer": str(demo_model / "tokenizer.json")})()
    assert job(b'{"kind": "regex", "text": "a"}') == b"{}"
    refused = json.loads(job(b'{"kind": "json_schema", "text": "{\\"type\\":5}"}'))
    assert refused["error"].startswith("grammar is not valid: 5 is not")


def test_a_grammar_with_a_control_token_above_unused_ids_is_proved() -> None:
    job = compile_job({"tokenizer": str(Path(__file__).parents[3] / "corpus/tokenizers/gpt-oss/tokenizer.json")})()
    for text, refusal in [('start: <|channel|> "ab"', b"{}"), ("start: <|no-such-token|>", b"unknown special token")]:
        assert refusal in job(json.dumps({"kind": GrammarKind.LARK.value, "text": text}).encode())


def test_a_grammar_that_fails_at_its_first_token_is_refused(tokenizer: LLTokenizer) -> None:
    """The first mask is fine; after the first token there are too many states."""
    wide = {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(600)}}
    assert "cannot compile regex from schema" in refusal(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(wide)), tokenizer)
