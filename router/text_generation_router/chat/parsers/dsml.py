"""Tool calls of DeepSeek V3.2 and V4 in DSML: tags whose arguments say if they are texts or JSON.

V3.2    <｜DSML｜function_calls>\\n<｜DSML｜invoke name="NAME">\\n<｜DSML｜parameter name="KEY" string="true">VALUE</｜DSML｜parameter>\\n
        </｜DSML｜invoke>\\n</｜DSML｜function_calls>
V4      the same in <｜DSML｜tool_calls>
"""

import re
from typing import Final

from text_generation_router.chat.parsers.argument_types import JSON_OR_STRING, STRING, argument_types
from text_generation_router.chat.parsers.syntax import Pattern
from text_generation_router.chat.parsers.tagged import TaggedParser, Tags, unquoted

DSML: Final = "｜DSML｜"

_ARGUMENT: Final = re.compile(r'\s*"([^"]*)"(?:\s+string="([^"]*)")?\s*')


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
