"""Grammars of tool calls: alone, in free text, or in the model's own format in place of an answer that follows a constraint."""

import json
from collections.abc import Mapping, Sequence

from text_generation_proto.values import Grammar, GrammarKind
from text_generation_router.chat.conversation import Tool
from text_generation_router.chat.parsers.syntax import CallSyntax, JsonCall, Pattern, Pieces, Repeat, Slot, Until
from text_generation_router.errors import InvalidRequest, ToolError
from text_generation_router.grammar.lark import LarkRules
from text_generation_router.grammar.normalize import normalize
from text_generation_router.grammar.schema import Schema, as_text, check_size, every, is_local, not_valid, read_schema

MAX_KEYS = 64
"""Names of arguments that are written out; of a tool with more, any name is allowed."""

_GAP = r"\n{1,2}"
_ANY_KEY = r"[^<>\"\n]{1,256}"
_PYTHON_RULES = (
    r"""PY_TEXT: /"([^"\\\n]|\\[^\n])*"/ | /'([^'\\\n]|\\[^\n])*'/""",
    r"PY_NUMBER: /-?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?/",
    r"PY_NAME: /[a-zA-Z_][a-zA-Z0-9_]{0,255}/",
    'py_value: PY_TEXT | PY_NUMBER | "True" | "False" | "None" | py_list | py_dict',
    'py_list: "[" (py_value (", " py_value)*)? "]"',
    'py_dict: "{" (PY_TEXT ": " py_value (", " PY_TEXT ": " py_value)*)? "}"',
    'py_arguments: (PY_NAME "=" py_value (", " PY_NAME "=" py_value)*)?',
)

MAX_TOOLS = 128
"""OpenAI's limit."""


def calls_or_answer(
    tools: Sequence[Tool],
    syntaxes: Sequence[CallSyntax],
    answer: Grammar,
    special: Mapping[str, int],
    *,
    before: Pieces = (),
    answer_start: str = "",
    one_call: bool = False,
) -> Grammar:
    """Return a grammar for `before`, and then calls of `tools`, or `answer` after `answer_start`.

    The arguments of strict tools follow their schemas; those of others are any object. `special`: see LarkRules.
    Raises InvalidRequest, ToolError.
    """
    check_number(tools)
    check_size([dict(tool.parameters) for tool in tools])
    writer = _AnswerWriter(special)
    alternatives = [writer.calls(tools, syntax, one_call=one_call) for syntax in syntaxes]
    alternatives.append(
        " ".join([*([writer.rules.literal(answer_start)] if answer_start else []), writer.answer(answer)])
    )
    start = writer.rules.rule(" | ".join(alternatives))
    return Grammar(GrammarKind.LARK, writer.rules.written(" ".join(filter(None, (writer.pieces(before), start)))))


class _AnswerWriter:
    """Writes the rules of one grammar."""

    def __init__(self, special: Mapping[str, int]) -> None:
        self.rules = LarkRules(special)
        self._of_tools: dict[tuple[int, Slot | JsonCall], str] = {}
        """The expressions of pieces of tools, which several syntaxes have; by the tool's `id` and the piece."""

    def answer(self, answer: Grammar) -> str:
        match answer.kind:
            case GrammarKind.JSON_SCHEMA:
                return self.rules.schema(json.loads(answer.text))
            case GrammarKind.REGEX:
                return self.rules.regex(answer.text)
            case _:
                raise ToolError(
                    "Grammar and tools are mutually exclusive, unless the grammar is a JSON schema or a regular expression"
                )

    def calls(self, tools: Sequence[Tool], syntax: CallSyntax, *, one_call: bool) -> str:
        """Return the expression of one or several calls."""
        call = self.rules.rule(" | ".join(self.pieces(syntax.call, tool) for tool in tools))
        if syntax.between is not None and not one_call:
            call = f"{call} ({' '.join(filter(None, (self.pieces(syntax.between), call)))})*"
        block = " ".join(filter(None, (self.pieces(syntax.before), call, self.pieces(syntax.after))))
        if not syntax.blocks or one_call:
            return block
        block = self.rules.rule(block)
        return f"{block} ({self.gap} {block})*"

    @property
    def gap(self) -> str:
        return self.rules.regex(_GAP) + "?"

    def pieces(self, pieces: Pieces, tool: Tool | None = None) -> str:
        """Return the expression of some pieces; those of a call need its tool."""
        written = []
        for piece in pieces:
            match piece:
                case str():
                    written.append(self.rules.literal(piece) if piece else "")
                case Until(end, inside):
                    written.append(self.rules.until(end, inside))
                case Pattern(expression):
                    written.append(self.rules.regex(expression))
                case Repeat(repeated):
                    written.append(f"({self.pieces(repeated, tool)})*")
                case Slot.GAP:
                    written.append(self.gap)
                case Slot.PYTHON_ARGUMENTS:
                    written.append(self.rules.named("py_arguments", _PYTHON_RULES))
                case _:
                    assert tool is not None, "a call has a tool"
                    key = id(tool), piece
                    if key not in self._of_tools:
                        self._of_tools[key] = self._of_tool(piece, tool)
                    written.append(self._of_tools[key])
        return " ".join(filter(None, written))

    def _of_tool(self, piece: Slot | JsonCall, tool: Tool) -> str:
        match piece:
            case JsonCall(key):
                # No literals: where the answer is JSON too, the first of its characters may be equal.
                place = "#/$defs/arguments"
                definitions = {"$defs": {"arguments": _arguments(tool, place)}}
                return self.rules.schema(_call(tool.name, place, key) | definitions)
            case Slot.NAME:
                return self.rules.literal(tool.name)
            case Slot.KEY:
                names = tool.parameters.get("properties")
                if not isinstance(names, dict) or not 0 < len(names) <= MAX_KEYS:
                    return self.rules.regex(_ANY_KEY)
                return self.rules.rule(" | ".join(self.rules.literal(name) for name in names))
            case _:
                return self.rules.schema(_arguments(tool, "#"))


def _arguments(tool: Tool, place: str) -> Schema:
    return arguments_schema(tool, place) if tool.strict else {"type": "object"}


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
