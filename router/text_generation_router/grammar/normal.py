"""What of a schema constrains a text: annotations go, and what is written in two ways is written in one."""

from __future__ import annotations

from text_generation_router.grammar.schema_tree import Schema, every

_ANNOTATIONS: dict[str, type] = {
    "$comment": str,
    "$schema": str,  # all schemas are judged as draft 2020-12, as in TGI
    "x-guidance": object,  # the engine's own switches, among them one that ignores what it does not enforce
    "default": object,
    "deprecated": bool,
    "description": str,
    "example": object,
    "examples": list,
    "readOnly": bool,
    "title": str,
    "writeOnly": bool,
}
"""With their types: what has another is left for the meta-schema to find."""
_STANDARD_FORMATS = frozenset(
    [
        "date-time",
        "date",
        "time",
        "duration",
        "email",
        "idn-email",
        "hostname",
        "idn-hostname",
        "ipv4",
        "ipv6",
        "uri",
        "uri-reference",
        "iri",
        "iri-reference",
        "uuid",
        "uri-template",
        "json-pointer",
        "relative-json-pointer",
        "regex",
    ]
)
_OBJECT_KEYWORDS = frozenset(("properties", "required", "additionalProperties", "patternProperties", "minProperties"))
_IN_PLACE = frozenset(("$ref", "$dynamicRef", "anyOf", "oneOf", "allOf", "if", "dependentSchemas"))


def normalize(root: Schema) -> None:
    """Edit `root` so that the same texts, or fewer, satisfy it. Needs `check_weight` first; any garbage is left alone.

    Objects that name properties and say nothing of others are closed, as in TGI: a model that may invent properties
    does. What names properties is an object, as in TGI, although by the standard a number would do as well. Not where schemas are merged (`allOf`, siblings of `$ref`): closing one part would forbid the others'
    properties; nor beside `oneOf`, where fewer texts in one branch may mean that two branches agree.
    """
    if isinstance(root.get("$id"), str) and "#" not in root["$id"]:
        del root["$id"]
    schemas = list(every(root))
    close = not any(_merges(schema) for schema in schemas)
    for schema in schemas:
        for keyword in schema.keys() & _ANNOTATIONS.keys():
            if isinstance(schema[keyword], _ANNOTATIONS[keyword]):
                del schema[keyword]
        _drop_idle(schema)
        _settle_unevaluated(schema)
        if close and _means_object(schema):
            schema["type"] = "object"
        if close and _is_open(schema):
            schema["additionalProperties"] = False


def _merges(schema: Schema) -> bool:
    if "allOf" in schema or "oneOf" in schema:
        return True
    return not _IN_PLACE.isdisjoint(schema) and not _OBJECT_KEYWORDS.isdisjoint(schema)


def _means_object(schema: Schema) -> bool:
    if not isinstance(schema.get("properties"), dict):
        return False
    return "type" not in schema and "enum" not in schema and "const" not in schema and _IN_PLACE.isdisjoint(schema)


def _is_open(schema: Schema) -> bool:
    properties, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        return False
    if "additionalProperties" in schema or "patternProperties" in schema or "minProperties" in schema:
        return False
    return all(isinstance(name, str) and name in properties for name in required)


def _drop_idle(schema: Schema) -> None:
    """Drop keywords that are not enforced where they constrain nothing."""
    most = schema.get("maxItems")
    unique = schema.get("uniqueItems")
    if unique is False or (unique is True and type(most) is int and 0 <= most <= 1):
        schema.pop("uniqueItems", None)
    idle: list[str] = []
    if "contains" not in schema:
        idle += [word for word in ("minContains", "maxContains") if type(schema.get(word)) is int and schema[word] >= 0]
    if "if" not in schema or not ("then" in schema or "else" in schema):
        idle += [
            word for word in ("if", "then", "else") if schema.get(word) == {} or isinstance(schema.get(word), bool)
        ]
    for word in ("unevaluatedItems", "unevaluatedProperties", "propertyNames"):
        if schema.get(word) is True or schema.get(word) == {}:
            idle.append(word)
    if schema.get("propertyNames") == {"type": "string"}:
        idle.append("propertyNames")
    idle += [word for word in ("dependentRequired", "dependentSchemas", "dependencies") if schema.get(word) == {}]
    named = schema.get("format")
    if isinstance(named, str) and named not in _STANDARD_FORMATS:
        idle.append("format")  # `int32`, `password`: by the standard a note for people
    for keyword in idle:
        schema.pop(keyword, None)


def _settle_unevaluated(schema: Schema) -> None:
    """Without schemas merged in place, `unevaluatedProperties` is `additionalProperties` by another name."""
    if _IN_PLACE.isdisjoint(schema):
        for keyword, plain in (("unevaluatedProperties", "additionalProperties"), ("unevaluatedItems", "items")):
            if keyword in schema and (plain not in schema or isinstance(schema[keyword], bool)):
                inner = schema.pop(keyword)
                schema.setdefault(plain, inner)
