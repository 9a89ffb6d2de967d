"""Schemas that are refused, each by what is wrong with it, and that a refusal comes at once."""

from __future__ import annotations

import time
from typing import Any

import pytest

from text_generation_router.errors import InvalidRequest
from text_generation_router.grammar.checks import check_schema
from text_generation_router.grammar.forms import read_schema
from text_generation_router.grammar.normal import normalize

Json = dict[str, Any]
PROMPTLY_S = 0.5


def judge(schema: object) -> Json:
    """As a client's schema goes; what is left of it."""
    read = read_schema(schema)
    normalize(read)
    check_schema(read)
    return read


def holding(inner: object) -> Json:
    return {"type": "object", "properties": {"x": inner}, "required": ["x"]}


def nested(keyword: str, depth: int) -> Json:
    schema: Json = {"type": "string"}
    for kind in range(depth):
        schema = {keyword: [schema, holding({"const": kind})]}
    return schema


def doubling(depth: int) -> Json:
    """2 ** depth values, references followed."""
    definitions: Json = {
        f"a{level}": {"type": "array", "prefixItems": [{"$ref": f"#/$defs/a{level + 1}"}] * 2} for level in range(depth)
    }
    return {"$ref": "#/$defs/a0", "$defs": {**definitions, f"a{depth}": {"type": "string"}}}


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
    (doubling(30), "references followed"),
    (nested("oneOf", 12), "nested too deeply"),
    (nested("anyOf", 12), "nested too deeply"),
    (nested("allOf", 12), "nested too deeply"),
    ({"anyOf": [{"const": value} for value in range(257)]}, "more than 256 alternatives"),
    ({"enum": list(range(2001))}, "`enum` has more than 2000 values"),
    (holding({"type": "string", "pattern": "^(a+)+$"}), "an unbounded repetition"),
    ({"type": "object", "patternProperties": {"(a*)*": {}}}, "an unbounded repetition"),
    (holding({"const": 3.602879701896397e16}), "too large for `const` and `enum`"),
    (holding({"enum": [{"a": [2**64]}]}), "too large for `const` and `enum`"),
    (holding({"multipleOf": 0.01}), "`multipleOf` 0.01"),
    ({"type": "object", "minProperties": 3}, "`minProperties`"),
    ({"type": "array", "minItems": 10_001}, "`minItems` is more than 10000"),
    (holding({"type": "string", "format": "regex"}), "the format 'regex' is not supported"),
    (holding({"$id": "https://example.org/inner"}), "the keyword `$id`"),
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
def test_what_cannot_be_enforced_is_refused_by_name_and_at_once(schema: object, reason: str) -> None:
    start = time.thread_time()
    with pytest.raises(InvalidRequest) as refusal:
        judge(schema)
    assert time.thread_time() - start < PROMPTLY_S
    assert str(refusal.value).startswith("Input validation error: cannot compile regex from schema: ")
    assert reason in str(refusal.value)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "strin"}, {"properties": []}, {"properties": {"a": 5}}, {"required": "a"}, {"items": [{}]}, {"anyOf": []},
        {"anyOf": {}}, {"minLength": -1}, {"type": ["string", "string"]}, {"$defs": {"a": {"type": 5}}}, {"maxItems": "3"},
        {"pattern": 5}, {"enum": 5}, {"patternProperties": 7}, {"additionalProperties": "no"}, {"allOf": [True, 3]},
        {"title": 5}, {"if": 3}, {"properties": {"a": {"readOnly": "yes"}}}, {"then": None}, {"uniqueItems": 1},
    ],
)  # fmt: skip
def test_a_schema_that_is_none_is_not_valid(schema: Json) -> None:
    with pytest.raises(InvalidRequest, match="grammar is not valid: "):
        judge(schema)


@pytest.mark.parametrize(
    "schema",
    [
        nested("oneOf", 4),
        doubling(8),
        {"$ref": "#/components/schemas/A", "components": {"schemas": {"A": {"type": "object"}}}},
        {
            "properties": {
                "a/b": {"type": "null"},
                "c": {"$ref": "#/properties/a~1b"},
                "d": {"$ref": "#/properties/a%2Fb"},
            }
        },
        {"properties": {"oneOf": {"const": {"$ref": "#"}}, "$ref": {"type": "string"}, "not": {"enum": [{"not": 1}]}}},
        {"$defs": {"unused": {"not": {}}}, "type": "object"},
        {"type": "object", "minProperties": 2, "required": ["a"]},
        holding({"multipleOf": 0.25}),
        {},
    ],
)
def test_ordinary_schemas_pass(schema: Json) -> None:
    judge(schema)


def test_annotations_go_and_the_engines_switches_with_them() -> None:
    schema = {
        "$schema": "http://json-schema.org/draft-07/schema#", "$id": "https://example.org/a", "title": "A",
        "x-guidance": {"lenient": True}, "type": "object", "additionalProperties": True,
        "properties": {"title": {"type": "string", "title": "B", "default": "c"}, "n": {"type": "integer", "format": "int32"}},
    }  # fmt: skip
    assert judge(schema) == {
        "type": "object",
        "additionalProperties": True,
        "properties": {"title": {"type": "string"}, "n": {"type": "integer"}},
    }


def test_objects_are_closed_but_not_where_schemas_are_merged() -> None:
    named = {"type": "object", "properties": {"a": {"type": "string"}}}
    assert judge(named)["additionalProperties"] is False
    assert "additionalProperties" not in judge({**named, "required": ["b"]})
    assert "additionalProperties" not in judge({**named, "allOf": [holding({"type": "null"})]})
    assert "additionalProperties" not in judge({"oneOf": [named, {"type": "null"}]})["oneOf"][0]
    assert (
        "additionalProperties" not in judge({**named, "$ref": "#/$defs/b", "$defs": {"b": holding({})}})["$defs"]["b"]
    )


def test_what_names_properties_is_an_object() -> None:
    assert judge({"properties": {"o": {"properties": {}}}})["type"] == "object"
    assert judge({"properties": {"o": {"properties": {}}}})["properties"]["o"]["type"] == "object"
    assert "type" not in judge({"properties": {}, "anyOf": [{"type": "object"}]})


def test_keywords_that_constrain_nothing_are_dropped() -> None:
    assert judge({"uniqueItems": False, "minContains": 2, "then": {}, "propertyNames": {"type": "string"}}) == {}
    assert judge({"uniqueItems": True, "maxItems": 1}) == {"maxItems": 1}
    assert judge({"unevaluatedProperties": False}) == {"additionalProperties": False}
    assert judge({"unevaluatedItems": {"type": "null"}}) == {"items": {"type": "null"}}


def test_the_clients_own_schema_is_left_as_it_is() -> None:
    schema = {"title": "A", "properties": {"a": {"title": "B"}}}
    judge(schema)
    assert schema == {"title": "A", "properties": {"a": {"title": "B"}}}
