"""References that end, and a size that stays bounded when they are followed: no recursion, no billion laughs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from text_generation_router.grammar.refusals import not_compilable
from text_generation_router.grammar.schema_tree import (
    COMBINATORS,
    DEFINITIONS,
    Schema,
    applied,
    every,
    is_local,
    resolve,
)

MAX_EXPANDED = 20_000
"""Values in the schema with every reference replaced by what it points at."""
MAX_NESTED = 4
"""`anyOf`, `oneOf` and `allOf` directly inside each other."""
MAX_COMBINED = 10
"""Combinators on one way down, with objects and arrays between them."""
MAX_ALTERNATIVES = 256
"""Schemas in one combinator."""


@dataclass(frozen=True, slots=True)
class _Extent:
    """What a schema amounts to with its references followed."""

    size: int
    nested: int
    combined: int


def check_references(root: Schema) -> list[Schema]:
    """Every schema that `root` applies to a text, each once, what it applies before itself. Raises InvalidRequest."""
    no_schemas = _no_schemas(root)
    extents: dict[int, _Extent] = {}
    done: list[Schema] = []
    entered: set[int] = set()
    stack: list[Schema] = [root]
    while stack:
        schema = stack[-1]
        if id(schema) in extents:
            stack.pop()
            continue
        edges = list(applied(schema))
        if "$ref" in schema:
            edges.append(("$ref", _target(root, schema["$ref"], no_schemas)))
        waiting = [inner for _, inner in edges if id(inner) not in extents]
        if not waiting:
            extents[id(schema)] = _extent(schema, edges, extents)
            done.append(schema)
            stack.pop()
            continue
        if id(schema) in entered or any(id(inner) in entered for inner in waiting):
            raise not_compilable("recursive references are not supported")
        entered.add(id(schema))
        stack.extend(waiting)
    return done


def _extent(schema: Schema, edges: list[tuple[str, Schema]], extents: dict[int, _Extent]) -> _Extent:
    size, nested, combined = 1 + _data_size(schema), 0, 0
    for keyword, inner in edges:
        extent = extents[id(inner)]
        step = keyword in COMBINATORS
        size += extent.size
        combined = max(combined, extent.combined + step)
        if step or keyword == "$ref":
            nested = max(nested, extent.nested + step)
    for keyword in COMBINATORS:
        if isinstance(schema.get(keyword), list) and len(schema[keyword]) > MAX_ALTERNATIVES:
            raise not_compilable(f"`{keyword}` has more than {MAX_ALTERNATIVES} alternatives")
    if nested > MAX_NESTED or combined > MAX_COMBINED:
        raise not_compilable("`anyOf`, `oneOf` and `allOf` are nested too deeply")
    if size > MAX_EXPANDED:
        raise not_compilable(f"the schema has more than {MAX_EXPANDED} values, references followed")
    return _Extent(size, nested, combined)


def _data_size(schema: Schema) -> int:
    values = schema.get("enum")
    return len(values) if isinstance(values, list) else 0


def _target(root: Schema, reference: object, no_schemas: set[int]) -> Schema:
    if not isinstance(reference, str) or not is_local(reference):
        raise not_compilable(f"only references into the schema itself (`#/…`) are supported, not {reference!r}")
    target = resolve(root, reference)
    if target is None or id(target) in no_schemas:
        raise not_compilable(f"the reference {reference!r} points at no schema")
    return target


def _no_schemas(root: Schema) -> set[int]:
    """Objects that are no schemas though a pointer can reach them: tables of schemas, and data."""
    found: set[int] = set()
    data: list[Any] = []
    for schema in every(root):
        for keyword in ("properties", "patternProperties", "dependentSchemas", *DEFINITIONS):
            found.add(id(schema.get(keyword)))
        data.extend((schema.get("enum"), schema.get("const")))
    while data:
        value = data.pop()
        if isinstance(value, dict):
            found.add(id(value))
            data.extend(value.values())
        elif isinstance(value, list):
            data.extend(value)
    found.discard(id(None))
    return found
