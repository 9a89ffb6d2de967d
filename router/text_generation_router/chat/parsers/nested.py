"""Tool calls in nested tags, each behind a special token: MiniMax-M3. NS stands for `]<]minimax[>[`.

NS<tool_call>\nNS<invoke name="NAME">NS<KEY>VALUENS</KEY>NS<KEY>NS<item>VALUENS</item>NS</KEY>NS</invoke>\nNS</tool_call>
"""

from __future__ import annotations

import json
import re
from typing import Final

from text_generation_router.chat.parsers.argument_types import STRING, member_schema, types_of, value_as_json
from text_generation_router.chat.parsers.base import Markers
from text_generation_router.chat.parsers.json_scanner import MAX_DEPTH
from text_generation_router.chat.parsers.syntax import CallSyntax, Slot, Until
from text_generation_router.chat.parsers.tagged import TaggedParser, Tags

MINIMAX_TOKEN: Final = "]<]minimax[>["

_TAG: Final = re.compile(re.escape(MINIMAX_TOKEN) + r"<(/?)([^>]*)>")

_TEXT_OR_ELEMENTS: Final = STRING | {"elements"}
"""The types of a value without types in the schema, which is held until its elements show."""

Element = tuple[str, str, list["Element"]]
"""Name, text and elements."""


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
        return self._word, types_of(
            member_schema(self._schema, self._schema, self._word), self._schema, _TEXT_OR_ELEMENTS
        )

    def _value_as_json(self, value: str) -> str:
        root: Element = ("", "", [])
        stack, at = [root], 0
        for tag in _TAG.finditer(value):
            name, text, elements = stack[-1]
            stack[-1] = name, text + value[at : tag.start()], elements
            at = tag.end()
            if not tag[1] and len(stack) < MAX_DEPTH:
                stack.append((tag[2], "", []))
            elif tag[1] and len(stack) > 1:
                stack[-2][2].append(stack.pop())
        name, text, elements = stack[-1]
        stack[-1] = name, text + value[at:], elements
        while len(stack) > 1:
            stack[-2][2].append(stack.pop())
        return self._element(stack[0], member_schema(self._schema, self._schema, self._key_name))

    def _element(self, element: Element, schema: object) -> str:
        _, text, elements = element
        types = types_of(schema, self._schema)
        if not elements:
            empty = (
                ""
                if text.strip() or types & STRING
                else "[]"
                if "array" in types
                else "{}"
                if "object" in types
                else ""
            )
            return empty or value_as_json(text, types)
        if "array" in types:
            items = member_schema(schema, self._schema)
            return f"[{', '.join(self._element(inner, items) for inner in elements)}]"
        values: dict[str, list[str]] = {}
        for inner in elements:
            values.setdefault(inner[0], []).append(self._element(inner, member_schema(schema, self._schema, inner[0])))
        members = []
        for name, found in values.items():
            value = found[0] if len(found) == 1 else f"[{', '.join(found)}]"
            members.append(f"{json.dumps(name, ensure_ascii=False)}: {value}")
        return f"{{{', '.join(members)}}}"
