"""Edits of schemas before they are compiled."""

from __future__ import annotations

from typing import Any

from text_generation_router.grammar.normalize import normalize
from text_generation_router.grammar.schema import read_schema

Json = dict[str, Any]


def normalized(schema: object) -> Json:
    read = read_schema(schema)
    normalize(read)
    return read


def holding(inner: object) -> Json:
    return {"type": "object", "properties": {"x": inner}, "required": ["x"]}


def test_annotations_and_options_of_the_engine_are_dropped() -> None:
    schema = {
        "$schema": "http://json-schema.org/draft-07/schema#", "$id": "https://example.org/a#", "title": "A",
        "x-guidance": {"lenient": True}, "type": "object", "additionalProperties": True,
        "properties": {"title": {"type": "string", "title": "B", "$id": "http://a.example/#b", "default": "c"}, "n": {"type": "integer", "format": "int32"}},
    }  # fmt: skip
    assert normalized(schema) == {
        "type": "object",
        "additionalProperties": True,
        "properties": {"title": {"type": "string"}, "n": {"type": "integer"}},
    }


def test_objects_are_closed_unless_schemas_are_merged() -> None:
    named = {"type": "object", "properties": {"a": {"type": "string"}}}
    assert normalized(named)["additionalProperties"] is False
    assert "additionalProperties" not in normalized({**named, "required": ["b"]})
    assert "additionalProperties" not in normalized({**named, "allOf": [holding({"type": "null"})]})
    assert "additionalProperties" not in normalized({"oneOf": [named, {"type": "null"}]})["oneOf"][0]
    assert (
        "additionalProperties"
        not in normalized({**named, "$ref": "#/$defs/b", "$defs": {"b": holding({})}})["$defs"]["b"]
    )


def test_tuples_of_older_drafts_are_those_of_the_newest() -> None:
    pair = [{"type": "string", "title": "A"}, {"properties": {}}]
    assert normalized(holding({"items": pair, "additionalItems": False}))["properties"]["x"] == {
        "prefixItems": [{"type": "string"}, {"type": "object", "properties": {}, "additionalProperties": False}],
        "items": False,
    }
    assert normalized({"items": [{}], "prefixItems": [{}]}) == {"items": [{}], "prefixItems": [{}]}


def test_the_tag_of_a_discriminated_union_is_required() -> None:
    """As pydantic writes it for `k: Literal["a"] = "a"`."""
    cat = {
        "type": "object",
        "properties": {"k": {"const": "a", "default": "a"}, "x": {"type": "integer"}},
        "required": ["x"],
    }
    dog = {"type": "object", "properties": {"k": {"const": "b", "default": "b"}}}
    union = {"discriminator": {"propertyName": "k"}, "oneOf": [{"$ref": "#/$defs/cat"}, dog, True]}
    read = normalized({**union, "$defs": {"cat": cat}})
    assert read["$defs"]["cat"]["required"] == ["x", "k"]
    assert read["oneOf"][1]["required"] == ["k"]
    assert "required" not in normalized({**union, "discriminator": {"propertyName": "z"}})["oneOf"][1]


def test_a_schema_with_properties_is_an_object() -> None:
    assert normalized({"properties": {"o": {"properties": {}}}})["type"] == "object"
    assert normalized({"properties": {"o": {"properties": {}}}})["properties"]["o"]["type"] == "object"
    assert "type" not in normalized({"properties": {}, "anyOf": [{"type": "object"}]})


def test_keywords_that_constrain_nothing_are_dropped() -> None:
    assert normalized({"uniqueItems": False, "minContains": 2, "then": {}, "propertyNames": {"type": "string"}}) == {}
    assert normalized({"uniqueItems": True, "maxItems": 1}) == {"maxItems": 1}
    assert normalized({"uniqueItems": True, "maxItems": 2}) == {"uniqueItems": True, "maxItems": 2}
    assert normalized({"unevaluatedProperties": False}) == {"additionalProperties": False}
    assert normalized({"unevaluatedItems": {"type": "null"}}) == {"items": {"type": "null"}}


def test_the_schema_of_the_client_is_not_edited() -> None:
    schema = {"title": "A", "properties": {"a": {"title": "B"}}}
    normalized(schema)
    assert schema == {"title": "A", "properties": {"a": {"title": "B"}}}
