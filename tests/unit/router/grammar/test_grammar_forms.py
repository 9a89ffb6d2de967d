"""The forms in which clients send a grammar, and TGI's texts for values that are none."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from text_generation_proto.values import Grammar, GrammarKind
from text_generation_router.errors import InvalidRequest
from text_generation_router.grammar.forms import ANY_OBJECT, guided, response_format, tgi_grammar

Json = dict[str, Any]

SCHEMA: Json = {"properties": {"a": {"type": "string", "description": "é"}}, "required": ["a"]}
AS_GRAMMAR = Grammar(
    GrammarKind.JSON_SCHEMA,
    '{"properties":{"a":{"type":"string"}},"required":["a"],"type":"object","additionalProperties":false}',
)


@pytest.mark.parametrize(
    "form",
    [
        {"type": "json", "value": SCHEMA},
        {"type": "json_object", "value": SCHEMA},
        {"type": "json", "value": json.dumps(SCHEMA)},
        {"type": "json_schema", "value": {"name": "x", "schema": SCHEMA, "strict": True}},
    ],
)
def test_tgi_has_four_forms_of_a_schema(form: Json) -> None:
    assert tgi_grammar(form) == AS_GRAMMAR
    assert response_format(form) == AS_GRAMMAR


def test_tgi_form_of_an_expression() -> None:
    assert tgi_grammar({"type": "regex", "value": "^[ab]+$"}) == Grammar(GrammarKind.REGEX, "[ab]+")


def test_openai_forms() -> None:
    assert response_format({"type": "text"}) is None
    assert response_format({"type": "json_object"}) == ANY_OBJECT
    assert response_format({"type": "json_object", "schema": SCHEMA}) == AS_GRAMMAR
    wanted = {"name": "x", "strict": True, "schema": SCHEMA}
    assert response_format({"type": "json_schema", "json_schema": wanted}) == AS_GRAMMAR
    assert response_format({"type": "json_schema", **wanted}) == AS_GRAMMAR


def test_openai_forms_need_no_properties() -> None:
    grammar = response_format({"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "array"}}})
    assert grammar == Grammar(GrammarKind.JSON_SCHEMA, '{"type":"array"}')


def test_trtllm_serves_forms() -> None:
    assert response_format({"type": "json", "schema": SCHEMA}) == AS_GRAMMAR
    assert response_format({"type": "json_schema", "json_schema": SCHEMA}) == AS_GRAMMAR
    assert response_format({"type": "regex", "regex": "^[ab]+$"}) == Grammar(GrammarKind.REGEX, "[ab]+")
    assert response_format({"type": "ebnf", "ebnf": "root ::= x"}) == Grammar(GrammarKind.EBNF, "root ::= x")


def test_vllms_fields() -> None:
    assert guided({"prompt": "x"}) is None
    assert guided({"guided_json": SCHEMA}) == AS_GRAMMAR
    assert guided({"structured_outputs": {"json": SCHEMA}}) == AS_GRAMMAR
    assert guided({"guided_regex": "a|b"}) == Grammar(GrammarKind.REGEX, "a|b")
    assert guided({"guided_choice": ["a.b", "c|d"]}) == Grammar(GrammarKind.REGEX, r"a\.b|c\|d")
    rules, tag = Grammar(GrammarKind.EBNF, "root ::= x"), Grammar(GrammarKind.STRUCTURAL_TAG, '{"format":{}}')
    for body in ({"guided_grammar": rules.text}, {"ebnf": rules.text}, {"structured_outputs": {"grammar": rules.text}}):
        assert guided(body) == rules
    for body in ({"structural_tag": tag.text}, {"structured_outputs": {"structural_tag": {"format": {}}}}):
        assert guided(body) == tag
    assert response_format({"type": "structural_tag", "format": {}}) == tag
    assert guided({"json_schema": json.dumps(SCHEMA)}) == AS_GRAMMAR
    assert guided({"structured_outputs": {"json_object": True, "disable_any_whitespace": True}}) == ANY_OBJECT
    assert guided({"structured_outputs": {"json_object": False, "json": None, "disable_fallback": True}}) is None


UNREADABLE = (
    "{",
    "[1]",
    "5",
    '{"properties": NaN}',
    '{"a":' * 40_000,
    "1" * 5000,
    '{"properties": {"a": {"const": "\\ud800"}}}',
)
UNKNOWN: list[Json] = [{}, {"type": "grammar", "value": "x"}, {"type": 5, "value": "x"}, {"type": {}, "value": ""}]
REFUSED: list[tuple[Callable[[Json], object], Json, str]] = [
    *((tgi_grammar, {"type": kind, "value": value}, f"grammar is not supported: the {what} must be .*a text$")
      for kind, what in (("json", "schema of type `json`"), ("json_schema", "schema of type `json_schema`"), ("regex", "regular expression"))
      for value in (None, 5, True, [])),
    (tgi_grammar, {"type": "json", "value": {"type": "object"}}, "grammar is not valid: Grammar must have a 'properties' field$"),
    *((tgi_grammar, {"type": "json", "value": text}, "grammar is not valid: ") for text in UNREADABLE),
    (tgi_grammar, {"type": "regex", "value": "\ud800"}, ".*surrogate"),
    *((read, form, "grammar is not valid: (unknown type|missing `type`)") for form in UNKNOWN for read in (tgi_grammar, response_format)),
    *((response_format, {"type": "json_schema", "json_schema": holder}, "grammar is not valid: .*must be an object")
      for holder in (None, 5, {}, {"strict": True}, {"schema": None}, {"schema": [1]})),
    *((guided, body, "grammar is not valid: ")
      for body in ({"guided_choice": []}, {"guided_choice": "a"}, {"guided_choice": [1]}, {"guided_grammar": " "})),
    (guided, {"structured_outputs": {"json": {}, "whitespace_pattern": "x"}}, "grammar is not valid: .*pattern` is not supported"),
    (response_format, {"type": "regex"}, "grammar is not valid: `regex` must be a text"),
    (response_format, {"type": "ebnf"}, "grammar is not valid: rules must be a text"),
    *((response_format, {"type": kind, **rest}, f"grammar is not valid: `schema` of a format of type `{kind}` must be an object")
      for kind, rest in (("json", {}), ("json", {"schema": "a"}), ("json_schema", {"json_schema": {"name": "x"}}))),
    (guided, {"guided_regex": "a", "guided_json": {}}, "grammar is not valid: only one .*`guided_regex` and `guided_json`"),
    *((guided, {"structured_outputs": options}, f"grammar is not valid: .*`structured_outputs.{name}`")
      for name, options in (
          ("regexp", {"regexp": "a"}), ("whitespace_pattern", {"json": {}, "whitespace_pattern": "x"}),
          ("disable_additional_properties", {"disable_additional_properties": True}), ("json_object", {"json_object": 1}),
      )),
]  # fmt: skip


@pytest.mark.parametrize(("read", "form", "message"), REFUSED)
def test_a_form_that_is_no_grammar_is_refused_in_tgis_words(
    read: Callable[[Json], object], form: Json, message: str
) -> None:
    with pytest.raises(InvalidRequest, match="^Input validation error: " + message):
        read(form)


def test_the_error_for_an_unknown_option_names_its_field() -> None:
    with pytest.raises(InvalidRequest) as caught:
        guided({"structured_outputs": {"regexp": "a"}})
    assert caught.value.param == "structured_outputs.regexp"
