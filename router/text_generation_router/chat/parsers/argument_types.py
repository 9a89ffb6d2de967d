"""Values of arguments that a model wrote as plain text, converted by the tool's JSON schema.

A client's schema may be any JSON: a part that says nothing about the type of a value, or that is not a schema, is skipped.
"""

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

from text_generation_router.chat.parsers.literals import literal_as_json, refuse
from text_generation_router.chat.parsers.readers import NUMBER

Schema = Mapping[str, Any]

STRING: Final = frozenset({"string"})
JSON_OR_STRING: Final = frozenset({"JSON", "string"})
NULL_OR_STRING: Final = frozenset({"string", "null"})

_NULLS: Final = ("null", "None")

_MAX_NULL: Final = 16
"""Characters of a null with the whitespace around it."""
_MAX_DEPTH: Final = 8
"""References and unions within each other that are followed."""
_OTHER_NAMES: Final = {
    "str": "string", "int": "integer", "float": "number", "double": "number", "bool": "boolean", "dict": "object",
    "list": "array",
}  # fmt: skip
"""Names of types that are not JSON schema's, but common in the schemas of clients."""
_NAMES: Final[dict[type, str]] = {
    str: "string", int: "integer", float: "number", bool: "boolean", dict: "object", list: "array",
}  # fmt: skip
_INTEGER: Final = re.compile(r"(-?)0*(0|[1-9][0-9]*)(?:\.0+)?")


def argument_types(parameters: Schema, name: str, otherwise: frozenset[str] = STRING) -> frozenset[str]:
    """Return the JSON types of a tool's argument; `otherwise` if the schema has no types for it."""
    return types_of(member_schema(parameters, parameters, name), parameters, otherwise)


def types_of(schema: object, root: Schema, otherwise: frozenset[str] = STRING) -> frozenset[str]:
    """Return the JSON types that a schema names; `otherwise` if it names none."""
    return _types(schema, root, _MAX_DEPTH) or otherwise


def member_schema(schema: object, root: Schema, name: str | None = None) -> object:
    """Return the schema of a member of an object, without `name` that of the items of an array; None without one."""
    for _ in range(_MAX_DEPTH):
        if not isinstance(schema, Mapping):
            return None
        if "$ref" in schema and "properties" not in schema:
            schema = _resolve(schema["$ref"], root)
            continue
        unions = (schema.get(union) for union in ("anyOf", "oneOf"))
        branches = next((union for union in unions if isinstance(union, list)), ())
        kind = "array" if name is None else "object"
        fitting = (branch for branch in branches if kind in _types(branch, root, _MAX_DEPTH))
        if "type" in schema or "properties" in schema or (branch := next(fitting, None)) is None:
            break
        schema = branch
    if not isinstance(schema, Mapping):
        return None
    if name is None:
        return schema.get("items")
    properties = schema.get("properties")
    known = properties if isinstance(properties, Mapping) else {}
    return known.get(name, schema.get("additionalProperties"))


def value_as_json(text: str, types: frozenset[str]) -> str:
    """Return the JSON of a value of one of `types`; the text as a string if it fits none of the others."""
    written = text.strip()
    if "JSON" in types:
        with suppress(ValueError, RecursionError):
            json.loads(written, parse_constant=refuse)
            return written
    if "null" in types and written in _NULLS:
        return "null"
    if "integer" in types and (integer := _INTEGER.fullmatch(written)):
        return integer[1] + integer[2]
    if "number" in types and NUMBER.fullmatch(written):
        return written
    if "boolean" in types and written.lower() in ("true", "false"):
        return written.lower()
    container = {"{": "object", "[": "array"}.get(written[:1])
    if container in types and (value := literal_as_json(written)) is not None:
        return value
    return json.dumps(text, ensure_ascii=False)


def may_be_null(text: str) -> bool:
    """Return True if a value that starts with `text` may be null."""
    return len(text) <= _MAX_NULL and any(null.startswith(text.strip()) for null in _NULLS)


def _types(schema: object, root: Schema, depth: int) -> frozenset[str]:
    """Return the types that a schema names; none if it allows any."""
    if not isinstance(schema, Mapping) or not depth:
        return frozenset()
    if "type" in schema:
        named = schema["type"]
        names = named if isinstance(named, list) else [named]
        return frozenset(_OTHER_NAMES.get(name, name) for name in names if isinstance(name, str))
    if "$ref" in schema:
        return _types(_resolve(schema["$ref"], root), root, depth - 1)
    if isinstance(values := schema.get("enum", [schema["const"]] if "const" in schema else None), list):
        return frozenset(_NAMES.get(type(value), "null") for value in values)
    for union in ("anyOf", "oneOf"):
        if isinstance(branches := schema.get(union), list):
            return frozenset().union(*(_types(branch, root, depth - 1) for branch in branches))
    if isinstance(parts := schema.get("allOf"), list):
        return next(filter(None, (_types(part, root, depth - 1) for part in parts)), frozenset())
    return frozenset({"object"} if "properties" in schema else {"array"} if "items" in schema else ())


def _resolve(reference: object, root: Schema) -> object:
    """Return the part of `root` that a local reference names; None for any other."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    found: object = root
    for part in reference[2:].split("/"):
        if not isinstance(found, Mapping):
            return None
        found = found.get(part.replace("~1", "/").replace("~0", "~"))
    return found
