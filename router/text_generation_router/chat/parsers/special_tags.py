"""Tool calls in tags behind special tokens.

MiniMax-M3, nested; NS stands for `]<]minimax[>[`:
NS<tool_call>\\nNS<invoke name="NAME">NS<KEY>VALUENS</KEY>NS<KEY>NS<item>VALUENS</item>NS</KEY>NS</invoke>\\nNS</tool_call>

DeepSeek in DSML, tags whose arguments say if they are texts or JSON:
V3.2    <｜DSML｜function_calls>\\n<｜DSML｜invoke name="NAME">\\n<｜DSML｜parameter name="KEY" string="true">VALUE</｜DSML｜parameter>\\n
        </｜DSML｜invoke>\\n</｜DSML｜function_calls>
V4      the same in <｜DSML｜tool_calls>
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from text_generation_router.chat.parsers.argument_types import (
    JSON_OR_STRING,
    STRING,
    argument_types,
    member_schema,
    types_of,
    value_as_json,
)
from text_generation_router.chat.parsers.base import Markers
from text_generation_router.chat.parsers.readers import MAX_DEPTH
from text_generation_router.chat.parsers.syntax import CallSyntax, Pattern, Slot, Until
from text_generation_router.chat.parsers.tagged import TaggedParser, Tags, unquoted

MINIMAX_TOKEN: Final = "]<]minimax[>["
DSML: Final = "｜DSML｜"

_TAG: Final = re.compile(re.escape(MINIMAX_TOKEN) + r"<(/?)([^>]*)>")
_ARGUMENT: Final = re.compile(r'\s*"([^"]*)"(?:\s+string="([^"]*)")?\s*')
_EMPTY: Final = {"array": "[]", "object": "{}"}
_TEXT_OR_ELEMENTS: Final = STRING | {"elements"}
"""The types of a value without types in the schema, which is held until its elements show."""


@dataclass(slots=True)
class _Element:
    name: str = ""
    text: str = ""
    elements: "list[_Element]" = field(default_factory=list)


class MiniMaxM3Parser(TaggedParser):
    """Format `minimax_m3`. An element with elements is an array if its schema says so, else an object."""

    TAGS = Tags(
        block=(f"{MINIMAX_TOKEN}<tool_call>", f"{MINIMAX_TOKEN}</tool_call>"),
        call=(f"{MINIMAX_TOKEN}<invoke name=", ">", f"{MINIMAX_TOKEN}</invoke>"),
        key=(f"{MINIMAX_TOKEN}<", ">"),
        value=("", f"{MINIMAX_TOKEN}</"),
    )

    SPECIAL = frozenset({MINIMAX_TOKEN})
    CALLS = (
        CallSyntax(
            (f'{MINIMAX_TOKEN}<invoke name="', Slot.NAME, '">', Until(f"{MINIMAX_TOKEN}</invoke>", (MINIMAX_TOKEN,)), Slot.GAP),
            (f"{MINIMAX_TOKEN}<tool_call>", Slot.GAP),
            (),
            (f"{MINIMAX_TOKEN}</tool_call>",),
            blocks=True,
        ),
    )  # fmt: skip

    def _begin_value(self) -> None:
        if self._word.startswith("/"):  # An end tag begins like the tag of an argument.
            self._end_call()
            self._phase = self._after if self._word == "/invoke" else self._text
            return
        super()._begin_value()
        self._value_end = f"{MINIMAX_TOKEN}</{self._word}>"
        self._value_ends = Markers((self._value_end, self.TAGS.call_end))

    def _argument(self) -> tuple[str, frozenset[str]]:
        return self._word, argument_types(self._schema, self._word, _TEXT_OR_ELEMENTS)

    def _value_as_json(self, value: str) -> str:
        pieces = iter(_TAG.split(value))
        stack = [_Element(text=next(pieces))]
        for closes, name, text in zip(pieces, pieces, pieces, strict=True):
            if not closes and len(stack) < MAX_DEPTH:
                inner = _Element(name)
                stack[-1].elements.append(inner)
                stack.append(inner)
            elif closes and len(stack) > 1:
                stack.pop()
            stack[-1].text += text
        return self._element(stack[0], member_schema(self._schema, self._schema, self._word))

    def _element(self, element: "_Element", schema: object) -> str:
        types = types_of(schema, self._schema)
        if not element.elements:
            if not element.text.strip() and not types & STRING and (empty := types & _EMPTY.keys()):
                return _EMPTY[min(empty)]
            return value_as_json(element.text, types)
        if "array" in types:
            items = member_schema(schema, self._schema)
            return _array(self._element(inner, items) for inner in element.elements)
        values: dict[str, list[str]] = {}
        for inner in element.elements:
            value = self._element(inner, member_schema(schema, self._schema, inner.name))
            values.setdefault(json.dumps(inner.name, ensure_ascii=False), []).append(value)
        members = (f"{name}: {found[0] if len(found) == 1 else _array(found)}" for name, found in values.items())
        return f"{{{', '.join(members)}}}"


def _array(values: Iterable[str]) -> str:
    return f"[{', '.join(values)}]"


def _tags(block: str) -> Tags:
    return Tags(
        block=(f"<{DSML}{block}>", f"</{DSML}{block}>"),
        call=(f"<{DSML}invoke name=", ">", f"</{DSML}invoke>"),
        key=(f"<{DSML}parameter name=", ">"),
        value=("", f"</{DSML}parameter>"),
        quote='"',
        attributes=(' string="', Pattern("true|false"), '"'),
    )


class DeepSeek32Parser(TaggedParser):
    """DeepSeek V3.2. The types of the schema, where it has some, win over what the argument says."""

    TAGS = _tags("function_calls")
    SPECIAL = frozenset({DSML})

    def _argument(self) -> tuple[str, frozenset[str]]:
        found = _ARGUMENT.fullmatch(self._word)
        name, is_text = (found[1], found[2] == "true") if found else (unquoted(self._word), False)
        types = argument_types(self._schema, name, STRING if is_text else JSON_OR_STRING)
        return name, STRING if is_text and types & STRING else types


class DeepSeek4Parser(DeepSeek32Parser):
    TAGS = _tags("tool_calls")
