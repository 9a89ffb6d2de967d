"""Grammars of tool calls, alone, in free text, or in place of an answer that a constraint describes."""

from collections.abc import Mapping, Sequence

from text_generation_proto.values import Grammar, GrammarKind
from text_generation_router.chat.conversation import Tool
from text_generation_router.errors import InvalidRequest
from text_generation_router.grammar.lark import LarkRules
from text_generation_router.grammar.normalize import normalize
from text_generation_router.grammar.schema import Schema, as_text, check_size, every, is_local, not_valid, read_schema

MAX_TOOLS = 128
"""OpenAI's limit."""


def forced_tools(tools: Sequence[Tool]) -> Grammar:
    """Return a grammar for one call of one of `tools`, which must not be empty. Raises InvalidRequest.

    One call also where the client allows parallel calls: the model would have to end a list of calls, and small models
    do not.
    """
    return Grammar(GrammarKind.JSON_SCHEMA, as_text(_call_schema(tools)))


def auto_tools(
    tools: Sequence[Tool], begin: str, end: str, special: Mapping[str, int], inside: Sequence[str] = ()
) -> Grammar:
    """Return a grammar for free text in which a call of one of `tools` and `end` follow every `begin`.

    `special`: see LarkRules; those of `inside` may occur in the text. Raises InvalidRequest.
    """
    assert begin, "a call needs a marker in front of it"
    rules = LarkRules(special)
    call = rules.rule(
        " ".join(
            filter(None, (rules.until(begin, inside), rules.schema(_call_schema(tools)), end and rules.literal(end)))
        )
    )
    return Grammar(GrammarKind.LARK, rules.written(f"{call}* {rules.free_with(inside)}"))


def check_number(tools: Sequence[Tool]) -> None:
    """Refuse more tools than one request may have. Raises InvalidRequest."""
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"at most {MAX_TOOLS} tools are supported. Given: {len(tools)}", param="tools")


def _call_schema(tools: Sequence[Tool]) -> Schema:
    assert tools, "a call needs a tool"
    check_number(tools)
    check_size([dict(tool.parameters) for tool in tools])  # all together, before any of them is read
    definitions = {f"tool{index}": arguments_schema(tool, f"#/$defs/tool{index}") for index, tool in enumerate(tools)}
    calls = [_call(tool.name, f"#/$defs/{name}") for tool, name in zip(tools, definitions, strict=True)]
    schema: Schema = calls[0] if len(calls) == 1 else {"anyOf": calls}
    schema = {**schema, "$defs": definitions}
    check_size(schema)
    return schema


def call_schema(name: str, arguments: Schema, key: str) -> Schema:
    """Return the schema of a call of one tool; references of `arguments` start at `#/$defs/arguments`."""
    return {**_call(name, "#/$defs/arguments", key), "$defs": {"arguments": arguments}}


def _call(name: str, place: str, key: str = "arguments") -> Schema:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, key: {"$ref": place}},
        "required": ["name", key],
        "additionalProperties": False,
    }


def arguments_schema(tool: Tool, place: str = "#") -> Schema:
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
