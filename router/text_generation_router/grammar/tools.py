"""Grammars of tool calls: `{"name": <a tool>, "arguments": <an object that follows its schema>}`."""

from __future__ import annotations

import json
from collections.abc import Sequence

from text_generation_proto.grammar_options import JSON_OPTIONS
from text_generation_proto.values import Grammar, GrammarKind
from text_generation_router.chat.conversation import Tool
from text_generation_router.errors import InvalidRequest
from text_generation_router.grammar.normalize import normalize
from text_generation_router.grammar.schema import Schema, as_text, check_size, every, is_local, not_valid, read_schema

EMBEDDED_SCHEMA = "payload: %json "
"""Start of the line of a Lark grammar that holds a schema."""

MAX_TOOLS = 128
"""OpenAI's limit."""


def forced_tools(tools: Sequence[Tool]) -> Grammar:
    """Return a grammar for one call of one of `tools`, which must not be empty. Raises InvalidRequest.

    One call also where the client allows parallel calls: the model would have to end a list of calls, and small models
    do not.
    """
    return Grammar(GrammarKind.JSON_SCHEMA, as_text(_call_schema(tools)))


def auto_tools(tools: Sequence[Tool], begin: str, end: str) -> Grammar:
    """Return a grammar for free text in which a call of one of `tools` and `end` follow every `begin`.

    `begin` must not be empty or a special token, which is no text. Raises InvalidRequest.
    """
    assert begin, "a call needs a marker in front of it"
    schema = {"x-guidance": JSON_OPTIONS, **_call_schema(tools)}
    lines = (
        "%llguidance {}",
        "start: call* FREE",
        f"call: opening payload {_literal(end) if end else ''}",
        f"opening[lazy]: FREE {_literal(begin)}",
        EMBEDDED_SCHEMA + as_text(schema),
        r"FREE: /(.|\n)*/",
    )
    return Grammar(GrammarKind.LARK, "\n".join(lines) + "\n")


def check_number(tools: Sequence[Tool]) -> None:
    """Refuse more tools than one request may have. Raises InvalidRequest."""
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"at most {MAX_TOOLS} tools are supported. Given: {len(tools)}")


def _call_schema(tools: Sequence[Tool]) -> Schema:
    assert tools, "a call needs a tool"
    check_number(tools)
    check_size([dict(tool.parameters) for tool in tools])  # all together, before any of them is read
    definitions = {f"tool{index}": _arguments(tool, f"#/$defs/tool{index}") for index, tool in enumerate(tools)}
    calls = [_call(tool, name) for tool, name in zip(tools, definitions, strict=True)]
    schema: Schema = calls[0] if len(calls) == 1 else {"anyOf": calls}
    schema = {**schema, "$defs": definitions}
    check_size(schema)
    return schema


def _call(tool: Tool, definition: str) -> Schema:
    return {
        "type": "object",
        "properties": {"name": {"const": tool.name}, "arguments": {"$ref": f"#/$defs/{definition}"}},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _arguments(tool: Tool, place: str) -> Schema:
    """Return the schema of the tool's arguments, always an object, with references that start at `place`."""
    schema = read_schema(dict(tool.parameters))
    normalize(schema)
    if schema.setdefault("type", "object") != "object":
        raise not_valid(f"the parameters of tool {tool.name} must be an object")
    if set(schema) == {"type"}:
        schema.update(properties={}, additionalProperties=False)
    for inner in list(every(schema)):
        reference = inner.get("$ref")
        if isinstance(reference, str) and is_local(reference):
            inner["$ref"] = place + reference[1:]
    return schema


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
