"""Edits of a client's schema before it is compiled: annotations are dropped, equivalent spellings become one."""

import re

from text_generation_router.grammar.schema import Schema, every, resolve

_ANNOTATIONS: dict[str, type] = {
    "$comment": str,
    "$schema": str,  # every schema is judged as draft 2020-12, as in TGI; see also `_replace_tuple`
    "x-guidance": object,  # the engine's own options; one of them makes it ignore unknown keywords
    "default": object,
    "deprecated": bool,
    "description": str,
    "example": object,
    "examples": list,
    "readOnly": bool,
    "title": str,
    "writeOnly": bool,
}
"""Annotations by name with their types. One of another type is left for the meta-schema to refuse."""
_STANDARD_FORMATS = frozenset(
    (
        *("date-time", "date", "time", "duration", "email", "idn-email", "hostname", "idn-hostname", "ipv4", "ipv6"),
        *("uri", "uri-reference", "iri", "iri-reference", "uuid", "uri-template", "json-pointer"),
        *("relative-json-pointer", "regex"),
    )
)
_OBJECT_KEYWORDS = frozenset(("properties", "required", "additionalProperties", "patternProperties", "minProperties"))
_NEGATED = re.compile(r"\\.|\[\^([]-]?)", re.DOTALL)
"""The start of a class in an expression, as `[^ab]`, with a first character that is literal there; or an escape."""
_IN_PLACE = frozenset(("$ref", "$dynamicRef", "anyOf", "oneOf", "allOf", "if", "dependentSchemas"))


def normalize(root: Schema) -> None:
    """Edit `root` so that the same texts, or fewer, satisfy it. `check_size` must have passed; any garbage is left alone.

    As in TGI, a schema with `properties` means an object, and one that says nothing of other properties forbids them: a
    model that may invent properties does. Not where schemas are merged (`allOf`, siblings of `$ref`), because a closed
    part forbids the properties of the others; nor beside `oneOf`, where a closed branch may come to agree with another.
    """
    schemas = []
    for schema in every(root):
        _replace_tuple(schema)
        schemas.append(schema)
    refer = any("$ref" in schema for schema in schemas)
    for schema in [root] if refer else schemas:
        # A base for references; an empty fragment at its end means nothing.
        if isinstance(schema.get("$id"), str) and not (refer and "#" in schema["$id"][:-1]):
            del schema["$id"]
    close = not any(_merges(schema) for schema in schemas)
    for schema in schemas:
        for keyword in schema.keys() & _ANNOTATIONS.keys():
            if isinstance(schema[keyword], _ANNOTATIONS[keyword]):
                del schema[keyword]
        for keyword in _idle_keywords(schema):
            schema.pop(keyword, None)
        _replace_unevaluated(schema)
        _exclude_null(schema)
        _require_tag(root, schema)
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
    return _IN_PLACE.isdisjoint(schema) and schema.keys().isdisjoint(("type", "enum", "const"))


def _is_open(schema: Schema) -> bool:
    properties, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        return False
    if not schema.keys().isdisjoint(("additionalProperties", "patternProperties", "minProperties")):
        return False
    return all(isinstance(name, str) and name in properties for name in required)


def _idle_keywords(schema: Schema) -> list[str]:
    """Return keywords that the engine does not support, where they constrain nothing."""
    most, unique = schema.get("maxItems"), schema.get("uniqueItems")
    idle = ["uniqueItems"] if unique is False or (unique is True and type(most) is int and 0 <= most <= 1) else []
    if "contains" not in schema:
        idle += [word for word in ("minContains", "maxContains") if type(schema.get(word)) is int and schema[word] >= 0]
    if "if" not in schema or not ("then" in schema or "else" in schema):
        idle += [word for word in ("if", "then", "else") if _allows_all(schema.get(word)) or schema.get(word) is False]
    for word in ("unevaluatedItems", "unevaluatedProperties", "propertyNames"):
        if _allows_all(schema.get(word)) or (word == "propertyNames" and schema.get(word) == {"type": "string"}):
            idle.append(word)
    idle += [word for word in ("dependentRequired", "dependentSchemas", "dependencies") if schema.get(word) == {}]
    named = schema.get("format")
    if isinstance(named, str) and named not in _STANDARD_FORMATS:
        idle.append("format")  # `int32`, `password`: an annotation by the standard
    return idle


def _allows_all(schema: object) -> bool:
    return schema is True or schema == {}


def _replace_unevaluated(schema: Schema) -> None:
    """Without schemas merged in place, `unevaluatedProperties` means `additionalProperties`."""
    if _IN_PLACE.isdisjoint(schema):
        for keyword, plain in (("unevaluatedProperties", "additionalProperties"), ("unevaluatedItems", "items")):
            if keyword in schema and (plain not in schema or isinstance(schema[keyword], bool)):
                inner = schema.pop(keyword)
                schema.setdefault(plain, inner)


def _replace_tuple(schema: Schema) -> None:
    """Write a tuple as draft 2020-12 does; in older drafts `items` has its schemas, as converters of zod still write it."""
    if isinstance(schema.get("items"), list) and "prefixItems" not in schema:
        schema["prefixItems"] = schema.pop("items")
        if "additionalItems" in schema:
            schema["items"] = schema.pop("additionalItems")


def _require_tag(root: Schema, schema: Schema) -> None:
    """Require the tag of a discriminated union in each of its schemas: pydantic does not if the tag has a default."""
    tag, branches = schema.get("discriminator"), schema.get("oneOf")
    name = tag.get("propertyName") if isinstance(tag, dict) else None
    for branch in branches if isinstance(name, str) and isinstance(branches, list) else ():
        target = resolve(root, branch.get("$ref")) or branch if isinstance(branch, dict) else {}
        properties, required = target.get("properties"), target.get("required", [])
        if isinstance(properties, dict) and name in properties and isinstance(required, list) and name not in required:
            target["required"] = [*required, name]


def _exclude_null(schema: Schema) -> None:
    """Take the null character out of the negated classes of patterns.

    In a string, llguidance lets a class that has all control characters match an escaped quote or backslash too, which `[^"]`
    excludes.
    """
    if isinstance(pattern := schema.get("pattern"), str):
        schema["pattern"] = _without_null(pattern)
    if isinstance(patterns := schema.get("patternProperties"), dict):
        schema["patternProperties"] = {_without_null(pattern): inner for pattern, inner in patterns.items()}


def _without_null(pattern: str) -> str:
    return _NEGATED.sub(lambda found: found[0] if found[1] is None else rf"[^\x00{re.escape(found[1])}", pattern)


def without_anchors(expression: str) -> str:
    """Return the expression without `^` in front and `$` at the end: here it always matches the whole text."""
    body = expression.removeprefix("^")
    if body.endswith("$"):
        escapes = len(body[:-1]) - len(body[:-1].rstrip("\\"))
        if escapes % 2 == 0:
            body = body[:-1]
    return body
