"""EBNF rules and structural tags as Lark: the texts that they allow, and rules that are refused in time."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLTokenizer

from text_generation_common.grammar_tokenizer import compiled
from text_generation_proto.values import Grammar
from text_generation_router.errors import InvalidRequest
from text_generation_router.grammar.forms import ebnf_grammar, tag_grammar
from text_generation_router.grammar.proof import prove
from text_generation_router.grammar.translate import translated

Json = dict[str, Any]
SPECIAL = {"<|im_start|>": 1, "<|im_end|>": 2}
CITY: Json = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CALL = '<f=get>{"city": "Rome"}</f>'


@pytest.fixture(scope="module")
def tokenizer(demo_model: Path) -> LLTokenizer:
    return LLTokenizer(str(demo_model / "tokenizer.json"))


def allows(grammar: Grammar, text: str, tokenizer: LLTokenizer) -> bool:
    matcher = compiled(translated(grammar, SPECIAL), tokenizer)
    assert not matcher.is_error(), matcher.get_error()
    tokens = tokenizer.tokenize_str(text, parse_special=True) if "<|im" in text else tokenizer.tokenize_str(text)
    return bool(matcher.consume_tokens(tokens) and matcher.is_accepting())


def tag(begin: str, content: Json, end: str) -> Json:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def of(form: Json) -> Grammar:
    return tag_grammar({"format": form})


SCHEMA: Json = {"type": "json_schema", "json_schema": CITY}
OLD = tag_grammar({"structures": [{"begin": "<f=get>", "schema": CITY, "end": "</f>"}], "triggers": ["<f="]})
NEW: Json = {"type": "triggered_tags", "triggers": ["<f="], "tags": [tag("<f=get>", SCHEMA, "</f>")]}
SUM = 'start: sum\nsum: /[0-9]+/ | sum "+" sum'


@pytest.mark.parametrize(
    ("grammar", "allowed", "forbidden"),
    [
        (ebnf_grammar('root ::= "yes" | "no"'), ["yes", "no"], ["maybe", ""]),
        (ebnf_grammar('root ::= e\ne ::= e "+" e | [0-9]+ # left'), ["1", "1+22+3"], ["1+", "+"]),
        (ebnf_grammar(r'root ::= "\u0041\x42" [\x61-\x63]* "\\n"'), ["ABcab\\n", "AB\\n"], ["AB", "ABd\\n"]),
        (ebnf_grammar(SUM), ["1+2"], ["a"]),
        (ebnf_grammar(f"?{SUM}"), ["1+2"], ["1-2"]),
        (OLD, ["free", CALL, f"So {CALL} and {CALL}."], ["<f=set>", '<f=get>{"city": 1}</f>']),
        (of(NEW), ["free", CALL, f"So {CALL}."], ['<f=get>{"town": ""}</f>']),
        (of(NEW | {"at_least_one": True}), [f"So {CALL} ok"], ["free"]),
        (of(NEW | {"at_least_one": True, "stop_after_first": True}), [f"So {CALL}"], ["free", CALL + CALL]),
        (of(tag("<|im_start|>x", {"type": "any_text"}, "<|im_end|>")), ["<|im_start|>x any <|im_end|>"], ["x any "]),
        (of(tag("(", {"type": "any_text"}, ")")), ["(a)"], ["(a", "a)"]),
        (
            of({"type": "sequence", "elements": [{"type": "const_string", "value": "n/"}, {"type": "regex", "pattern": "a/b|[0-9]"}]}),
            ["n/7", "n/a/b"],
            ["n/", "7"],
        ),
        (
            of({"type": "tags_with_separator", "separator": ", ", "tags": [tag("<", {"type": "grammar", "grammar": 'root ::= "}" [a-z]'}, ">")]}),
            ["", "<}a>", "<}a>, <}b>"],
            ["<}a><}b>", "<a>"],
        ),
        (of({"type": "or", "elements": [SCHEMA, {"type": "const_string", "value": "none"}]}), ["none", '{"city": ""}'], ["{}"]),
    ],
)  # fmt: skip
def test_the_translated_grammar_allows_the_same_texts(
    grammar: Grammar, allowed: Sequence[str], forbidden: Sequence[str], tokenizer: LLTokenizer
) -> None:
    prove(translated(grammar, SPECIAL), tokenizer)
    assert [text for text in allowed if not allows(grammar, text, tokenizer)] == []
    assert [text for text in forbidden if allows(grammar, text, tokenizer)] == []


def optional(depth: int) -> Json:
    return {"type": "optional", "content": optional(depth - 1)} if depth else {"type": "any_text"}


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (ebnf_grammar("root ::= x"), "Rule 'x' not found"),
        (ebnf_grammar('root ::= "a'), "Unexpected end"),
        (ebnf_grammar(r'root ::= "\ud800"'), "invalid character"),
        (ebnf_grammar("root ::= root"), "no text satisfies it"),
        (ebnf_grammar(f'root ::= {"(" * 20_000}"a"{")" * 20_000}'), "nested too deeply"),
        (ebnf_grammar("root ::= " + '("a" | "aa")* ' * 30), "Current row has|too long to follow"),
        (ebnf_grammar("start: a0\na60: /x/\n" + "".join(f"a{i}: a{i + 1} a{i + 1}\n" for i in range(60))), "Too many"),
        (ebnf_grammar("start: /((a{1,100}){1,100}){1,100}/"), "too many expressions"),
        (ebnf_grammar('start: p\np: %json {"type":"text"}'), "is not valid under any"),
        (ebnf_grammar('start: "a" (%json\n{"minItems":\n10001})?'), "`minItems` is more than 10000"),
        (ebnf_grammar('start: /"/ %json {"minItems": 10001} /"/'), "`minItems` is more than 10000"),
        (ebnf_grammar("start: a\na[lazy]: %json {"), "is not valid"),
        (of({"type": "qwen_xml_parameter"}), "the type 'qwen_xml_parameter' of a structural tag is not supported"),
        (of(NEW | {"triggers": ["x"]}), "no trigger is the start of the tag"),
        (of(NEW | {"tags": []}), "`tags` of a structural tag must be a list"),
        (of({"type": "any_text", "excludes": ["a"]}), "`excludes`"),
        (of(optional(30)), "too deeply nested"),
        (tag_grammar({"format": "x"}), "`format` of a structural tag must be an object"),
    ],
)
def test_rules_that_cannot_be_followed_are_refused_in_time(
    grammar: Grammar, message: str, tokenizer: LLTokenizer
) -> None:
    started = time.thread_time()
    with pytest.raises(InvalidRequest, match=message):
        prove(translated(grammar, SPECIAL), tokenizer)
    assert time.thread_time() - started < 1.5


def test_a_text_that_only_looks_like_a_schema_is_none(tokenizer: LLTokenizer) -> None:
    text = r'start: "\"%json {" /%json \(/ a # %json {' + "\n" + 'a: %json {"const": "%json {"} // %json {'
    prove(translated(ebnf_grammar(text), SPECIAL), tokenizer)


def test_schemas_in_a_structural_tag_are_judged_as_alone(tokenizer: LLTokenizer) -> None:
    schema = {"properties": {"a": {"$ref": "#"}}}
    grammar = translated(of(NEW | {"tags": [tag("<f=x>", {**SCHEMA, "json_schema": schema}, "")]}), SPECIAL)
    assert json.dumps("</f>") not in grammar.text
    with pytest.raises(InvalidRequest, match="recursive references"):
        prove(grammar, tokenizer)
