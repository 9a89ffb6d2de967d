"""The forms in which clients send a grammar, as a `Grammar` that `GrammarCompiler.prove` must still accept.

    TGI       parameters.grammar, response_format    {"type": "json" | "json_object" | "regex" | "json_schema", "value": …}
    OpenAI    response_format                        {"type": "text" | "json_object" | "json_schema", "json_schema": {…}}
    vLLM      guided_json, guided_regex, guided_choice, guided_grammar; structured_outputs: {"json" | "regex" | …: …};
              response_format                        {"type": "structural_tag", …}
    SGLang    json_schema, regex, ebnf, structural_tag
    trtllm-serve  response_format                    {"type": "json", "schema": …}, {"type": "regex" | "ebnf", same name: …},
                                                     {"type": "json_schema", "json_schema": the schema itself}

TGI requires `properties` at the top of a schema; OpenAI's forms do not.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from text_generation_proto.values import Grammar, GrammarKind
from text_generation_router.errors import InvalidRequest
from text_generation_router.grammar.normalize import normalize, without_anchors
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
        raise _unknown_type(kind, _TGI_TYPES)
    if kind == "regex":
        return regex_grammar(value)
    if kind == "json_schema" and isinstance(value, dict):
        value = value.get("schema")
    if not isinstance(value, str | dict):
        raise not_supported(f"the schema of type `{kind}` must be an object or a text")
    schema = read_schema(value)
    if "properties" not in schema:
        raise not_valid("Grammar must have a 'properties' field")
    return schema_grammar(schema)


def response_format(form: Mapping[str, Any]) -> Grammar | None:
    """Return the grammar of the forms of OpenAI and trtllm-serve, or of TGI's if there is a `value`; None if any text is allowed.

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
        case "json" | "json_schema" as kind:
            # The Responses API has the schema next to the type, the chat API one level deeper.
            holder = form.get("json_schema", form)
            if isinstance(holder, dict):
                is_schema = holder is not form and holder and holder.keys().isdisjoint(("name", "schema", "strict"))
                holder = holder if is_schema else holder.get("schema")
            if not isinstance(holder, dict):
                raise not_valid(f"`schema` of a format of type `{kind}` must be an object")
            return schema_grammar(read_schema(holder))
        case "regex":
            if not isinstance(expression := form.get("regex"), str):
                raise not_valid("`regex` must be a text")
            return regex_grammar(expression)
        case "ebnf":
            return ebnf_grammar(form.get("ebnf"))
        case "structural_tag":
            return tag_grammar({key: value for key, value in form.items() if key != "type"})
        case other:
            raise _unknown_type(
                other, ("text", "json", "json_object", "json_schema", "regex", "ebnf", "structural_tag")
            )


def _unknown_type(kind: object, known: Sequence[str]) -> InvalidRequest:
    found = "missing `type`" if kind is None else f"unknown type {str(kind)[:64]!r}"
    return not_valid(f"{found}, expected one of " + ", ".join(f"`{name}`" for name in known))


def guided(body: Mapping[str, Any]) -> Grammar | None:
    """Return the grammar of the fields of vLLM and SGLang; None if there are none. Raises InvalidRequest."""
    given: list[tuple[str, Callable[[Any], Grammar], Any]] = [
        (name, _FIELDS[name], value) for name, value in body.items() if name in _FIELDS and value is not None
    ]
    if (options := body.get("structured_outputs")) is not None:
        if not isinstance(options, Mapping):
            raise not_valid("`structured_outputs` must be an object")
        for key, value in options.items():
            is_off = value is None or (value is False and key in _SWITCHES)
            if key in _IDLE_OPTIONS or (key in _OPTIONS and is_off):
                continue
            if (read := _OPTIONS.get(key)) is None:
                name = f"structured_outputs.{key[:64]}"
                raise not_valid(f"`{name}` is not supported", name)
            given.append((f"structured_outputs.{key}", read, value))
    if len(given) > 1:
        names = " and ".join(f"`{name}`" for name, _, _ in given[:2])
        raise not_valid(f"only one kind of grammar can be asked for. Given: {names}")
    return next((read(value) for _, read, value in given), None)


def ebnf_grammar(value: object) -> Grammar:
    """Return the grammar of EBNF or Lark rules. Raises InvalidRequest."""
    if not isinstance(value, str) or not value.strip():
        raise not_valid("rules must be a text that is not empty")
    check_length(value)
    return Grammar(GrammarKind.EBNF, encodable(value))


def tag_grammar(value: object) -> Grammar:
    """Return the grammar of a structural tag, given as an object or as text. Raises InvalidRequest."""
    return Grammar(GrammarKind.STRUCTURAL_TAG, as_text(read_schema(value)))


def _json(value: object) -> Grammar:
    return schema_grammar(read_schema(value))


def _any_object(value: object) -> Grammar:
    if value is not True:
        raise not_valid("`structured_outputs.json_object` must be a boolean")
    return ANY_OBJECT


def regex_grammar(value: object) -> Grammar:
    """Return the grammar of an expression, which must match the whole text, with or without anchors.

    Raises InvalidRequest.
    """
    if not isinstance(value, str):
        raise not_supported("the regular expression must be a text")
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


_OPTIONS: dict[str, Callable[[Any], Grammar] | None] = {
    "json": _json,
    "regex": regex_grammar,
    "choice": choice_grammar,
    "grammar": ebnf_grammar,
    "structural_tag": tag_grammar,
    "json_object": _any_object,
    "disable_additional_properties": None,
    "whitespace_pattern": None,
}
"""The keys of vLLM's `structured_outputs`. None: known, and not supported."""
_SWITCHES = ("json_object", "disable_additional_properties")
_IDLE_OPTIONS = ("disable_any_whitespace", "disable_fallback")
"""No text has other white space, and no other library is fallen back to."""
_FIELDS: dict[str, Callable[[Any], Grammar]] = {
    "guided_json": _json,
    "guided_regex": regex_grammar,
    "guided_choice": choice_grammar,
    "guided_grammar": ebnf_grammar,
    "json_schema": _json,
    "regex": regex_grammar,
    "ebnf": ebnf_grammar,
    "structural_tag": tag_grammar,
}
"""The fields of vLLM, and from `json_schema` on of SGLang."""
