"""The forms in which clients send a grammar, as a `Grammar` that `GrammarCompiler.prove` must still accept.

    TGI       parameters.grammar, response_format    {"type": "json" | "json_object" | "regex" | "json_schema", "value": …}
    OpenAI    response_format                        {"type": "text" | "json_object" | "json_schema", "json_schema": {…}}
    vLLM      guided_json, guided_regex, guided_choice; structured_outputs: {"json" | "regex" | "choice": …}

TGI requires `properties` at the top of a schema; OpenAI's forms do not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from text_generation_proto.values import Grammar, GrammarKind
from text_generation_router.grammar.expressions import without_anchors
from text_generation_router.grammar.normalize import normalize
from text_generation_router.grammar.schema import (
    Schema,
    as_text,
    check_length,
    check_size,
    encodable,
    not_supported,
    not_valid,
    read_schema,
)

ANY_OBJECT = Grammar(GrammarKind.JSON_SCHEMA, '{"type":"object"}')
"""OpenAI's JSON mode."""

_TGI_TYPES = ("json", "json_object", "json_schema", "regex")


def tgi_grammar(form: Mapping[str, Any]) -> Grammar:
    """Return the grammar of TGI's `{"type": …, "value": …}`. Raises InvalidRequest (rules 17 and 18)."""
    kind, value = form.get("type"), form.get("value")
    if kind not in _TGI_TYPES:
        raise not_valid(f"unknown type {kind!r}, expected one of " + ", ".join(f"`{name}`" for name in _TGI_TYPES))
    if kind == "regex":
        return regex_grammar(value)
    if kind == "json_schema" and isinstance(value, dict):
        value = value.get("schema")
    if not isinstance(value, str | dict):
        raise not_supported()
    schema = read_schema(value)
    if "properties" not in schema:
        raise not_valid("Grammar must have a 'properties' field")
    return schema_grammar(schema)


def response_format(form: Mapping[str, Any]) -> Grammar | None:
    """Return the grammar of OpenAI's forms, or of TGI's if there is a `value`; None if any text is allowed.

    Raises InvalidRequest.
    """
    if "value" in form:
        return tgi_grammar(form)
    match form.get("type"):
        case "text":
            return None
        case "json_object":
            # Some clients put a schema beside it, which must not be dropped.
            return schema_grammar(read_schema(form["schema"])) if isinstance(form.get("schema"), dict) else ANY_OBJECT
        case "json_schema":
            # The Responses API has the schema next to the type, the chat API one level deeper.
            holder = form.get("json_schema", form)
            if not isinstance(holder, dict) or not isinstance(holder.get("schema"), dict):
                raise not_valid("`response_format.json_schema.schema` must be an object")
            return schema_grammar(read_schema(holder["schema"]))
        case other:
            raise not_valid(f"unknown type {other!r}, expected one of `text`, `json_object`, `json_schema`, `regex`")


def guided(body: Mapping[str, Any]) -> Grammar | None:
    """Return the grammar of vLLM's extra fields; None if there are none. Raises InvalidRequest."""
    wanted = {name: body.get(f"guided_{name}") for name in ("json", "regex", "choice")}
    if isinstance(newer := body.get("structured_outputs"), Mapping):
        wanted.update({name: newer[name] for name in wanted if newer.get(name) is not None})
    given = {name: value for name, value in wanted.items() if value is not None}
    if not given:
        return None
    if len(given) > 1:
        raise not_valid("only one kind of grammar can be asked for")
    if "json" in given:
        return schema_grammar(read_schema(given["json"]))
    return regex_grammar(given["regex"]) if "regex" in given else choice_grammar(given["choice"])


def regex_grammar(value: object) -> Grammar:
    """Return the grammar of an expression, which must match the whole text, with or without anchors.

    Raises InvalidRequest.
    """
    if not isinstance(value, str):
        raise not_supported()
    check_length(value)
    return Grammar(GrammarKind.REGEX, encodable(without_anchors(value)))


def choice_grammar(values: object) -> Grammar:
    """Return a grammar that allows each of these texts. Raises InvalidRequest."""
    if not isinstance(values, list) or not values or not all(isinstance(value, str) for value in values):
        raise not_valid("choices must be a list of strings that is not empty")
    check_size(values)
    return Grammar(GrammarKind.REGEX, encodable("|".join(map(re.escape, values))))


def schema_grammar(schema: Schema) -> Grammar:
    """Return the grammar of a schema from `read_schema`, which is edited."""
    normalize(schema)
    return Grammar(GrammarKind.JSON_SCHEMA, as_text(schema))
