"""Tool calls of DeepSeek V3.2 and V4 in DSML: tags whose arguments say if they are texts or JSON.

V3.2    <｜DSML｜function_calls>\\n<｜DSML｜invoke name="NAME">\\n<｜DSML｜parameter name="KEY" string="true">VALUE</｜DSML｜parameter>\\n
        </｜DSML｜invoke>\\n</｜DSML｜function_calls>
V4      the same in <｜DSML｜tool_calls>
V4.1    <｜DSML｜ calls>, <｜DSML｜ invoke …>, <｜DSML｜ parameter …>
"""

from __future__ import annotations

import re
from typing import Final

from text_generation_router.chat.parsers.argument_types import JSON_OR_STRING, STRING, member_schema, types_of
from text_generation_router.chat.parsers.literals import literal_as_json
from text_generation_router.chat.parsers.syntax import Pattern
from text_generation_router.chat.parsers.tagged import TaggedParser, Tags, unquoted

DSML: Final = "｜DSML｜"

_ARGUMENT: Final = re.compile(r'\s*"([^"]*)"(?:\s+string="([^"]*)")?\s*')
_WRAPPERS: Final = ("arguments", "input")
"""Names that models give to one argument that holds all of them."""


def _tags(block: str, before: str = DSML) -> Tags:
    return Tags(
        block=(f"<{before}{block}>", f"</{before}{block}>"),
        call=(f"<{before}invoke name=", ">", f"</{before}invoke>"),
        key=(f"<{before}parameter name=", ">"),
        value=("", f"</{before}parameter>"),
        quote='"',
        attributes=(' string="', Pattern("true|false"), '"'),
    )


class DeepSeek32Parser(TaggedParser):
    """DeepSeek V3.2. The types of the schema, where it has some, win over what the argument says."""

    TAGS = _tags("function_calls")
    SPECIAL = frozenset({DSML})

    def _begin_value(self) -> None:
        found = _ARGUMENT.fullmatch(self._word)
        self._word = found[1] if found else unquoted(self._word)
        schema = member_schema(self._schema, self._schema, self._word)
        self._is_text = found is not None and found[2] == "true"
        has_schema = "properties" in self._schema
        self._is_wrapper = has_schema and schema is None and self._word in _WRAPPERS and not self._arguments
        if self._is_wrapper:
            self._types = frozenset({"object"})
            self._parts.clear()
            self._phase = self._value
        else:
            super()._begin_value()

    def _end_value(self) -> None:
        value = "".join(self._parts).strip()
        if not self._is_wrapper or not value.startswith("{") or (written := literal_as_json(value)) is None:
            if self._is_wrapper:
                self._events.arguments(f'{{"{self._word}": ')
                self._arguments = 1
            super()._end_value()
        elif (members := written[:-1].rstrip()) != "{":
            self._events.arguments(members)
            self._arguments = 1

    def _argument(self) -> tuple[str, frozenset[str]]:
        schema = member_schema(self._schema, self._schema, self._word)
        types = types_of(schema, self._schema, STRING if self._is_text else JSON_OR_STRING)
        return self._word, STRING if self._is_text and types & STRING else types


class DeepSeek4Parser(DeepSeek32Parser):
    """DeepSeek V4."""

    TAGS = _tags("tool_calls")


class DeepSeek41Parser(DeepSeek32Parser):
    """DeepSeek V4.1."""

    TAGS = _tags("calls", f"{DSML} ")
