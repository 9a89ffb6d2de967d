"""Whether a schema is one that is enforced to the letter. What is not enforced is refused by name, never dropped."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from jsonschema import Draft202012Validator

from text_generation_router.grammar.expressions import BadExpression, check_expression
from text_generation_router.grammar.references import check_references
from text_generation_router.grammar.refusals import not_compilable, not_valid
from text_generation_router.grammar.schema_tree import Schema, every, shallow

MAX_ENUM = 2_000
"""Values of one `enum`."""
MAX_STEP = 100_000
"""Of `multipleOf`: the automaton has a state for each remainder."""
MAX_COUNT = 10_000
"""`minItems`, `minLength`, `minProperties`: what must be there; their opposites may be any number."""

_NOT_ENFORCED = (
    "$dynamicRef",
    "$recursiveRef",
    "contains",
    "dependencies",
    "dependentRequired",
    "dependentSchemas",
    "if",
    "not",
    "propertyNames",
    "unevaluatedItems",
    "unevaluatedProperties",
    "uniqueItems",
)
_ENFORCED_FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)


def check_schema(root: Schema) -> None:
    """Prove a normalised schema valid and harmless; `check_weight` bounded it. Raises InvalidRequest."""
    applied = check_references(root)  # first: it bounds what follows, and bears schemas that are not valid
    check_metaschema(root)
    for schema in applied:
        _check_keywords(schema, is_root=schema is root)
        _check_numbers(schema)
        _check_constants(schema)
        _check_expressions(schema)


def check_metaschema(root: Schema) -> None:
    """Rule 18: the schema obeys the meta-schema of draft 2020-12. Raises InvalidRequest.

    Each schema is judged alone, with those inside replaced by `true`, and those that then look alike are judged once:
    the meta-schema costs some 300 µs a schema, and large schemas are made of few shapes.
    """
    judged = set()
    for schema in every(root):
        alone = shallow(schema)
        if (key := json.dumps(alone)) in judged:
            continue
        judged.add(key)
        for error in _metaschema().iter_errors(alone):
            place = "/".join(map(str, error.absolute_path))
            raise not_valid(f"{error.message[:200]}" + (f" at {place[:80]}" if place else ""))


@cache
def _metaschema() -> Draft202012Validator:
    return Draft202012Validator(Draft202012Validator.META_SCHEMA)


def _check_keywords(schema: Schema, *, is_root: bool) -> None:
    for keyword in _NOT_ENFORCED:
        if keyword in schema:
            raise not_compilable(f"the keyword `{keyword}` is not supported")
    if "$id" in schema and not is_root:
        raise not_compilable("the keyword `$id` is supported at the top of the schema only")
    if schema.get("format") not in (None, *_ENFORCED_FORMATS):
        raise not_compilable(f"the format {schema['format']!r} is not supported")
    if len(schema.get("enum", ())) > MAX_ENUM:
        raise not_compilable(f"`enum` has more than {MAX_ENUM} values")
    # Free property names may come twice, and twice the same name counts once.
    if schema.get("minProperties", 0) > len(schema.get("required", ())) + 1:
        raise not_compilable("`minProperties` is supported up to one more than `required` has names")


def _check_numbers(schema: Schema) -> None:
    for keyword in ("minItems", "minLength", "minProperties"):
        if schema.get(keyword, 0) > MAX_COUNT:
            raise not_compilable(f"`{keyword}` is more than {MAX_COUNT}")
    step: Any = schema.get("multipleOf")
    if step is not None and step > MAX_STEP:
        raise not_compilable(f"`multipleOf` is more than {MAX_STEP}")
    if isinstance(step, float) and not (step * 2**20).is_integer():
        raise not_compilable(f"`multipleOf` {step} is no binary fraction: validators find 0.07 no multiple of 0.01")


def _check_constants(schema: Schema) -> None:
    """Numbers that come out of the engine, which reads them as 64 bits, with another value."""
    waiting: list[Any] = [schema.get("const"), schema.get("enum")]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            waiting.extend(value.values())
        elif isinstance(value, list):
            waiting.extend(value)
        elif (isinstance(value, float) and abs(value) >= 2**53) or (
            isinstance(value, int) and not -(2**63) <= value < 2**64
        ):
            raise not_compilable(f"the number {value!r} is too large for `const` and `enum`")


def _check_expressions(schema: Schema) -> None:
    pattern = schema.get("pattern")
    for expression in (*([pattern] if pattern is not None else []), *schema.get("patternProperties", ())):
        try:
            check_expression(expression)
        except BadExpression as error:
            raise not_compilable(str(error)) from None
