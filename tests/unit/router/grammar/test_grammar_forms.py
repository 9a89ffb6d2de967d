"""The forms in which clients send a grammar, and TGI's texts for values that are none."""

from __future__ import annotations

import json
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
PREFIX = "Input validation error: "


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


@pytest.mark.parametrize("kind", ["json", "json_schema", "regex"])
@pytest.mark.parametrize("value", [None, 5, True, []])
def test_rule_17_a_value_that_is_neither_text_nor_object(kind: str, value: object) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        tgi_grammar({"type": kind, "value": value})
    assert str(refusal.value) == PREFIX + "grammar is not supported"


def test_rule_18_a_schema_without_properties() -> None:
    with pytest.raises(InvalidRequest) as refusal:
        tgi_grammar({"type": "json", "value": {"type": "object"}})
    assert str(refusal.value) == PREFIX + "grammar is not valid: Grammar must have a 'properties' field"


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[1]",
        "5",
        '{"properties": NaN}',
        '{"a":' * 40_000,
        "1" * 5000,
        '{"properties": {"a": {"const": "\\ud800"}}}',
    ],
)
def test_rule_18_a_text_that_is_no_schema(text: str) -> None:
    with pytest.raises(InvalidRequest, match=PREFIX + "grammar is not valid: "):
        tgi_grammar({"type": "json", "value": text})


@pytest.mark.parametrize(
    "form", [{}, {"type": "grammar", "value": "x"}, {"type": 5, "value": "x"}, {"type": {}, "value": ""}]
)
def test_an_unknown_type_is_not_valid(form: Json) -> None:
    with pytest.raises(InvalidRequest, match="grammar is not valid: unknown type"):
        tgi_grammar(form)
    with pytest.raises(InvalidRequest, match="grammar is not valid: unknown type"):
        response_format(form)


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


@pytest.mark.parametrize("holder", [None, 5, {}, {"schema": None}, {"schema": [1]}])
def test_an_openai_form_without_a_schema_is_not_valid(holder: object) -> None:
    with pytest.raises(InvalidRequest, match="must be an object"):
        response_format({"type": "json_schema", "json_schema": holder})


def test_vllms_fields() -> None:
    assert guided({"prompt": "x"}) is None
    assert guided({"guided_json": SCHEMA}) == AS_GRAMMAR
    assert guided({"structured_outputs": {"json": SCHEMA}}) == AS_GRAMMAR
    assert guided({"guided_regex": "a|b"}) == Grammar(GrammarKind.REGEX, "a|b")
    assert guided({"guided_choice": ["a.b", "c|d"]}) == Grammar(GrammarKind.REGEX, r"a\.b|c\|d")


@pytest.mark.parametrize(
    "body",
    [{"guided_choice": []}, {"guided_choice": "a"}, {"guided_choice": [1]}, {"guided_regex": "a", "guided_json": {}}],
)
def test_bad_values_of_vllms_fields_are_not_valid(body: Json) -> None:
    with pytest.raises(InvalidRequest, match="grammar is not valid"):
        guided(body)


def test_half_a_surrogate_pair_is_no_expression() -> None:
    with pytest.raises(InvalidRequest, match="surrogate"):
        tgi_grammar({"type": "regex", "value": "\ud800"})
