"""A client's JSON schema (draft 2020-12): its size limits, the schemas inside it, and the refusals.

A property named `oneOf` is not a combinator, so places are found by keyword. Nothing here assumes a valid schema: a value of
the wrong type contains no schemas.
"""

import json
from collections.abc import Iterator
from typing import Any

from text_generation_common.grammar_options import MAX_GRAMMAR_TEXT
from text_generation_common.one_line import one_line
from text_generation_router.errors import InvalidRequest, NotSupported

Schema = dict[str, Any]

MAX_NODES = 8_000
"""Values in a schema: objects, arrays and everything in them."""
MAX_DEPTH = 64
"""Levels of objects and arrays; the JSON reader of the engine ends at 128."""

_SINGLE = (
    *("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames"),
    *("unevaluatedItems", "unevaluatedProperties"),
)
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_MAPS = ("properties", "patternProperties", "dependentSchemas")
_DEFINITIONS = ("$defs", "definitions")
_TABLES = frozenset((*_LISTS, *_MAPS, *_DEFINITIONS))


def not_supported(detail: str) -> InvalidRequest:
    """TGI's rule 17: a value that is not a grammar."""
    return NotSupported(f"grammar is not supported: {detail}")


def not_valid(detail: str, param: str | None = None) -> InvalidRequest:
    """TGI's rule 18: the grammar breaks the rules of its own language."""
    return InvalidRequest(f"grammar is not valid: {one_line(detail)}", param=param)


def not_compilable(detail: str) -> InvalidRequest:
    """TGI's rule 19: a valid grammar that cannot be enforced here. The text is from TGI's way to compile."""
    return InvalidRequest(f"cannot compile regex from schema: {one_line(detail)}")


def check_length(text: str) -> None:
    """Refuse a text that is too long. Raises InvalidRequest."""
    if len(text) > MAX_GRAMMAR_TEXT:
        raise not_compilable(f"the grammar is longer than {MAX_GRAMMAR_TEXT} characters")


def check_size(value: object) -> None:
    """Refuse a value that is too large; takes a few milliseconds at most. Must run before any other walk over a client's
    JSON. Raises InvalidRequest."""
    nodes = characters = depth = 0
    level: list[object] = [value]
    while level:
        below: list[object] = []
        for item in level:
            nodes += 1
            if isinstance(item, str):
                characters += len(item)
            elif isinstance(item, dict):
                characters += sum(map(len, item))
                below.extend(item.values())
            elif isinstance(item, list):
                below.extend(item)
            if nodes + len(below) > MAX_NODES:
                raise not_compilable(f"the schema has more than {MAX_NODES} values")
        if characters > MAX_GRAMMAR_TEXT:
            raise not_compilable(f"the schema is longer than {MAX_GRAMMAR_TEXT} characters")
        level = below
        depth += 1
        if level and depth > MAX_DEPTH:
            raise not_compilable(f"the schema is nested more than {MAX_DEPTH} levels deep")


def read_schema(value: object) -> Schema:
    """Return a copy of a client's schema, given as an object or as text. Raises InvalidRequest."""
    if isinstance(value, str):
        check_length(value)
        value = _parsed(value)
    check_size(value)
    if not isinstance(value, dict):
        raise not_valid(f"{str(value)[:80]} is not of type 'object'")
    copy: Schema = json.loads(as_text(value))
    return copy


def as_text(schema: Schema) -> str:
    """Return the schema as JSON. Raises InvalidRequest for values that JSON cannot express."""
    try:
        return encodable(json.dumps(schema, ensure_ascii=False, allow_nan=False, separators=(",", ":")))
    except ValueError:
        raise not_valid("numbers must be finite and of a usual size") from None


def encodable(text: str) -> str:
    """Return `text`. Raises InvalidRequest if it cannot be encoded as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise not_valid("it holds half of a surrogate pair") from None
    return text


def applied(schema: Schema) -> Iterator[Schema]:
    """Yield the schemas inside `schema` that take part in judging an instance; no `$ref`, no definitions."""
    for keyword in _SINGLE:
        if isinstance(inner := schema.get(keyword), dict):
            yield inner
    for keyword in _LISTS:
        if isinstance(inner := schema.get(keyword), list):
            yield from (item for item in inner if isinstance(item, dict))
    for keyword in _MAPS:
        if isinstance(inner := schema.get(keyword), dict):
            yield from (item for item in inner.values() if isinstance(item, dict))


def every(root: Schema) -> Iterator[Schema]:
    """Yield every schema in `root` once, definitions included. A schema may be edited before the next one is taken."""
    waiting, seen = [root], {id(root)}
    while waiting:
        schema = waiting.pop()
        yield schema
        inner = list(applied(schema))
        for keyword in _DEFINITIONS:
            if isinstance(named := schema.get(keyword), dict):
                inner.extend(item for item in named.values() if isinstance(item, dict))
        if (target := resolve(root, schema.get("$ref"))) is not None:
            inner.append(target)  # may lie outside all known places, as in `#/components/schemas/…`
        for item in inner:
            if id(item) not in seen:
                seen.add(id(item))
                waiting.append(item)


def shallow(schema: Schema) -> Schema:
    """Return `schema` with `true` for the schemas inside it; a table or list of schemas has one `true` for all."""
    alone = dict(schema)
    for keyword, inner in schema.items():
        if keyword in _SINGLE and isinstance(inner, dict):
            alone[keyword] = True
        elif keyword in _LISTS and isinstance(inner, list):
            others = [item for item in inner if not isinstance(item, dict)]
            alone[keyword] = others + [True] * (len(others) < len(inner))
        elif keyword in _TABLES and isinstance(inner, dict):
            named = {name: item for name, item in inner.items() if not isinstance(item, dict)}
            alone[keyword] = named | ({"": True} if len(named) < len(inner) else {})
    return alone


def resolve(root: Schema, reference: object) -> Schema | None:
    """Return the schema that a local reference (`#`, `#/…`, RFC 6901) points at; None if it points at no schema."""
    if not isinstance(reference, str) or not is_local(reference):
        return None
    place: object = root
    is_schema = True
    for escaped in reference.split("/")[1:]:
        step = escaped.replace("~1", "/").replace("~0", "~")  # llguidance knows no percent-encoding
        if is_schema and step in ("enum", "const"):
            return None
        is_schema = not (is_schema and step in _TABLES)
        if isinstance(place, dict):
            place = place.get(step)
        elif isinstance(place, list) and step.isascii() and step.isdigit() and len(step) < 7:
            place = place[int(step)] if int(step) < len(place) else None
        else:
            return None
    return place if is_schema and isinstance(place, dict) else None


def is_local(reference: str) -> bool:
    """True if this is a JSON pointer into the schema itself."""
    return reference == "#" or reference.startswith("#/")


def _parsed(text: str) -> object:
    try:
        return json.loads(text)
    except RecursionError:
        raise not_valid("the schema is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise not_valid(str(error)) from None
    except ValueError:
        raise not_valid("a number has too many digits") from None
