"""Where the schemas are inside a JSON schema (draft 2020-12): a property named `oneOf` is no combinator.

Nothing here assumes a valid schema: what has the wrong type has no schemas inside.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

Schema = dict[str, Any]

COMBINATORS = ("anyOf", "oneOf", "allOf")
DEFINITIONS = ("$defs", "definitions")
_SINGLE = (
    "items",
    "additionalProperties",
    "not",
    "if",
    "then",
    "else",
    "contains",
    "propertyNames",
    "unevaluatedItems",
    "unevaluatedProperties",
)
_LISTS = (*COMBINATORS, "prefixItems")
_MAPS = ("properties", "patternProperties", "dependentSchemas")
_PLACES = frozenset((*_SINGLE, *_LISTS, *_MAPS, *DEFINITIONS))


def applied(schema: Schema) -> Iterator[tuple[str, Schema]]:
    """(keyword, schema) of each schema that judges an instance because `schema` does; without `$ref` and definitions."""
    for keyword in _SINGLE:
        if isinstance(inner := schema.get(keyword), dict):
            yield keyword, inner
    for keyword in _LISTS:
        if isinstance(inner := schema.get(keyword), list):
            yield from ((keyword, item) for item in inner if isinstance(item, dict))
    for keyword in _MAPS:
        if isinstance(inner := schema.get(keyword), dict):
            yield from ((keyword, item) for item in inner.values() if isinstance(item, dict))


def every(root: Schema) -> Iterator[Schema]:
    """Every schema in the text, definitions included, each once. A schema may be edited once the next was asked for."""
    waiting, seen = [root], {id(root)}
    while waiting:
        schema = waiting.pop()
        inner = [item for _, item in applied(schema)]
        for keyword in DEFINITIONS:
            if isinstance(named := schema.get(keyword), dict):
                inner.extend(item for item in named.values() if isinstance(item, dict))
        if (target := resolve(root, schema.get("$ref"))) is not None:
            inner.append(target)  # may lie outside all places known here, as in `#/components/schemas/…`
        for item in inner:
            if id(item) not in seen:
                seen.add(id(item))
                waiting.append(item)
        yield schema


def shallow(schema: Schema) -> Schema:
    """`schema` with `true` for every schema inside it, and once for all of a table or list: its own keywords remain."""
    alone = dict(schema)
    for keyword in schema.keys() & _PLACES:
        inner = schema[keyword]
        if keyword in _SINGLE:
            alone[keyword] = True if isinstance(inner, dict) else inner
        elif keyword in _LISTS and isinstance(inner, list):
            others = [item for item in inner if not isinstance(item, dict)]
            alone[keyword] = [*others, True] if len(others) < len(inner) else others
        elif keyword not in _LISTS and isinstance(inner, dict):
            others_named = {name: item for name, item in inner.items() if not isinstance(item, dict)}
            alone[keyword] = {**others_named, "": True} if len(others_named) < len(inner) else others_named
    return alone


def resolve(root: Schema, reference: object) -> Schema | None:
    """The schema that a local reference (`#`, `#/…`, RFC 6901) points at; None where there is none."""
    if not isinstance(reference, str) or not is_local(reference):
        return None
    place: object = root
    for step in reference.split("/")[1:]:
        place = _inside(place, _unescaped(step))
    return place if isinstance(place, dict) else None


def is_local(reference: str) -> bool:
    """Whether this is a JSON pointer into the schema itself."""
    return reference == "#" or reference.startswith("#/")


def _inside(place: object, step: str) -> object:
    if isinstance(place, dict):
        return place.get(step)
    if isinstance(place, list) and step.isascii() and step.isdigit() and len(step) < 7:
        return place[int(step)] if int(step) < len(place) else None
    return None


def _unescaped(step: str) -> str:
    return unquote(step).replace("~1", "/").replace("~0", "~")
