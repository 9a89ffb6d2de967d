"""What the model may write when it calls a tool: `{"name": <a tool>, "arguments": <what its schema says>}`."""

from __future__ import annotations

import json
from collections.abc import Sequence

from text_generation_proto.values import Grammar, GrammarKind
from text_generation_router.chat.conversation import Tool
from text_generation_router.errors import InvalidRequest
from text_generation_router.grammar.forms import as_text, read_schema
from text_generation_router.grammar.normal import normalize
from text_generation_router.grammar.options import JSON_OPTIONS
from text_generation_router.grammar.refusals import not_valid
from text_generation_router.grammar.schema_tree import Schema, every, is_local
from text_generation_router.grammar.weight import check_weight

EMBEDDED_SCHEMA = "payload: %json "
"""How the line of a Lark text begins that holds a schema."""


MAX_TOOLS = 128
"""OpenAI's limit."""


def forced_tools(tools: Sequence[Tool]) -> Grammar:
    """One call of one of `tools`, of which there is at least one. Raises InvalidRequest.

    One call even where the client allows several in parallel: a list would have to be ended by the model, and small
    ones do not end it.
    """
    return Grammar(GrammarKind.JSON_SCHEMA, as_text(_call_schema(tools)))


def auto_tools(tools: Sequence[Tool], begin: str, end: str) -> Grammar:
    """Free text in which every `begin` is followed by a call of one of `tools` and by `end`. Raises InvalidRequest.

    `begin` must not be empty, nor be a special token: those are no text.
    """
    assert begin, "without a beginning nothing tells a call from text"
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
    """As many tools as one request may bring. Raises InvalidRequest."""
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"at most {MAX_TOOLS} tools are supported. Given: {len(tools)}")


def _call_schema(tools: Sequence[Tool]) -> Schema:
    assert tools, "a call needs a tool"
    check_number(tools)
    check_weight([dict(tool.parameters) for tool in tools])  # of all together, before any of them is read
    definitions = {f"tool{index}": _arguments(tool, f"#/$defs/tool{index}") for index, tool in enumerate(tools)}
    calls = [_call(tool, name) for tool, name in zip(tools, definitions, strict=True)]
    schema: Schema = calls[0] if len(calls) == 1 else {"anyOf": calls}
    schema = {**schema, "$defs": definitions}
    check_weight(schema)
    return schema


def _call(tool: Tool, definition: str) -> Schema:
    return {
        "type": "object",
        "properties": {"name": {"const": tool.name}, "arguments": {"$ref": f"#/$defs/{definition}"}},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _arguments(tool: Tool, place: str) -> Schema:
    """The tool's schema, of an object in any case, with its references pointing to where it now lies."""
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
