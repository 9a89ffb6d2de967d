"""The ways clients write a grammar, as a `Grammar` that is yet to be proven (`GrammarCompiler.prove`).

    TGI       parameters.grammar, response_format    {"type": "json" | "json_object" | "regex" | "json_schema", "value": …}
    OpenAI    response_format                        {"type": "text" | "json_object" | "json_schema", "json_schema": {…}}
    vLLM      guided_json, guided_regex, guided_choice; structured_outputs: {"json" | "regex" | "choice": …}

TGI wants `properties` at the top of a schema; OpenAI's forms do not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from text_generation_proto.values import Grammar, GrammarKind
from text_generation_router.errors import InvalidRequest
from text_generation_router.grammar.expressions import without_anchors
from text_generation_router.grammar.normal import normalize
from text_generation_router.grammar.refusals import not_supported, not_valid
from text_generation_router.grammar.schema_tree import Schema
from text_generation_router.grammar.weight import check_length, check_weight

ANY_OBJECT = Grammar(GrammarKind.JSON_SCHEMA, '{"type":"object"}')
"""What OpenAI calls JSON mode."""

_TGI_TYPES = ("json", "json_object", "json_schema", "regex")


def tgi_grammar(form: Mapping[str, Any]) -> Grammar:
    """TGI's `{"type": …, "value": …}`. Raises InvalidRequest (rules 17 and 18)."""
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
    """OpenAI's forms, and TGI's where there is a `value`; None: any text will do. Raises InvalidRequest."""
    if "value" in form:
        return tgi_grammar(form)
    match form.get("type"):
        case "text":
            return None
        case "json_object":
            # Some clients put a schema beside it: to drop it would be to promise less than was asked for.
            return schema_grammar(read_schema(form["schema"])) if isinstance(form.get("schema"), dict) else ANY_OBJECT
        case "json_schema":
            # The Responses API has the schema beside the type, the chat API one level down.
            holder = form.get("json_schema", form)
            if not isinstance(holder, dict) or not isinstance(holder.get("schema"), dict):
                raise not_valid("`response_format.json_schema.schema` must be an object")
            return schema_grammar(read_schema(holder["schema"]))
        case other:
            raise not_valid(f"unknown type {other!r}, expected one of `text`, `json_object`, `json_schema`, `regex`")


def guided(body: Mapping[str, Any]) -> Grammar | None:
    """vLLM's extra fields of a request; None where there are none. Raises InvalidRequest."""
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
    """An expression that the whole text satisfies; anchors around it say nothing more. Raises InvalidRequest."""
    if not isinstance(value, str):
        raise not_supported()
    check_length(value)
    return Grammar(GrammarKind.REGEX, _encodable(without_anchors(value)))


def choice_grammar(values: object) -> Grammar:
    """One of these texts. Raises InvalidRequest."""
    if not isinstance(values, list) or not values or not all(isinstance(value, str) for value in values):
        raise not_valid("choices must be a list of strings that is not empty")
    check_weight(values)
    return Grammar(GrammarKind.REGEX, _encodable("|".join(map(re.escape, values))))


def schema_grammar(schema: Schema) -> Grammar:
    """A schema of `read_schema` as a grammar: normalised, which edits it."""
    normalize(schema)
    return Grammar(GrammarKind.JSON_SCHEMA, as_text(schema))


def read_schema(value: object) -> Schema:
    """A copy of a client's schema, given as an object or as its text, found small enough. Raises InvalidRequest."""
    if isinstance(value, str):
        check_length(value)
        value = _parsed(value)
    check_weight(value)
    if not isinstance(value, dict):
        raise not_valid(f"{str(value)[:80]} is not of type 'object'")
    copy: Schema = json.loads(as_text(value))
    return copy


def as_text(schema: Schema) -> str:
    """The schema as JSON. Raises InvalidRequest for what JSON has no word for."""
    try:
        return _encodable(json.dumps(schema, ensure_ascii=False, allow_nan=False, separators=(",", ":")))
    except ValueError:
        raise not_valid("numbers must be finite and of a usual size") from None


def _parsed(text: str) -> object:
    try:
        return json.loads(text)
    except RecursionError:
        raise not_valid("the schema is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise not_valid(str(error)) from None
    except ValueError:
        raise not_valid("a number has too many digits") from None


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        error: InvalidRequest = not_valid("it holds half of a surrogate pair")
        raise error from None
    return text
