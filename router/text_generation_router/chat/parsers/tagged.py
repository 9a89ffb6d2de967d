"""Tool calls in tags: a tag for each argument, whose value is plain text that the tool's schema gives a type.

Qwen3-Coder     <tool_call>\\n<function=NAME>\\n<parameter=KEY>\\nVALUE\\n</parameter>\\n</function>\\n</tool_call>
GLM-4.5         <tool_call>NAME\\n<arg_key>KEY</arg_key>\\n<arg_value>VALUE</arg_value>\\n</tool_call>
MiniMax-M2      <minimax:tool_call>\\n<invoke name="NAME">\\n<parameter name="KEY">VALUE</parameter>\\n</invoke>\\n
                </minimax:tool_call>
Hunyuan 3       <tool_calls>\\n<tool_call>NAME<tool_sep>\\n<arg_key>KEY</arg_key>\\n<arg_value>VALUE</arg_value>\\n</tool_call>\\n
                </tool_calls>
"""

import json
from collections.abc import Sequence
from typing import ClassVar, Final

from text_generation_router.chat.events import Event
from text_generation_router.chat.parsers.argument_types import (
    NULL_OR_STRING,
    STRING,
    argument_types,
    may_be_null,
    value_as_json,
)
from text_generation_router.chat.parsers.base import CallParser, Markers, Tools
from text_generation_router.chat.parsers.literals import json_text
from text_generation_router.chat.parsers.readers import MAX_NAME, SPACE
from text_generation_router.chat.parsers.syntax import CallSyntax, Pieces, Repeat, Slot, Until

QWEN_FUNCTION: Final = "<function="
GLM_KEY: Final = "<arg_key>"
MINIMAX_BLOCK: Final = "<minimax:tool_call>"
SEED_BLOCK: Final = "<seed:tool_call>"

HUNYUAN_SUFFIX: Final = ":opensource"
HUNYUAN_SEPARATORS: Final = ("<tool_sep>", f"<tool_sep{HUNYUAN_SUFFIX}>", "<tool_sep{}>")
"""The last one as the released template has it, which formats its tags."""

_MAX_GAP: Final = 16
"""Whitespace between the end of a call and the end of its block, where the end tag of the last value is missing."""


class Tags:
    """The tags of a format. A tag ends with the text given last; the end tags stand alone."""

    def __init__(
        self,
        block: tuple[str, str],
        key: tuple[str, str],
        value: tuple[str, str],
        call: tuple[str, str, str] = ("", "", ""),
        *,
        lines: bool = False,
        quote: str = "",
        attributes: Pieces = (),
    ) -> None:
        """`block`, `value`: start and end; `key`: before and after the name; `call`: before and after the name, and the end.

        Without `call` the block is a call, and its name ends at the next tag. `lines`: a newline after the start and
        before the end of a value belongs to the tags. `quote`: stands around names. `attributes`: follow the name of an
        argument.
        """
        (self.block, self.block_end), (self.key, _), (self.value, self.value_end) = block, key, value
        self.call, name_end, self.call_end = call
        self.lines = lines
        self.all = frozenset((*block, *key, *value, *call)) - {"", ">"}
        self.in_text = Markers((self.block, self.block_end, self.call))
        self.calls = Markers((self.call,))
        self.name_end = Markers((name_end,) if name_end else (self.key, self.block_end))
        self.name_ends_before = not name_end
        self.members = Markers((self.key, self.call_end, self.block_end))
        self.key_end = Markers((key[1],))
        self.values = Markers((self.value,))
        self.value_ends = Markers((self.value_end, self.key, self.call_end))
        self.block_ends = Markers((self.block_end,))
        self.after_call = Markers((self.call, self.block_end))
        gap = Slot.GAP
        before_value = (gap, self.value) if self.value else ()
        key_and_value = (self.key + quote, Slot.KEY, quote, *attributes, key[1], *before_value, Until(self.value_end))
        members = (gap, Repeat((*key_and_value, gap)))
        self.syntax = CallSyntax((self.block, Slot.NAME, *members, self.block_end), blocks=True)
        if self.call:
            whole = (self.call + quote, Slot.NAME, quote + name_end, *members, self.call_end, gap)
            self.syntax = CallSyntax(whole, (self.block, gap), (), (self.block_end,), blocks=True)


class TaggedParser(CallParser):
    """Reads calls in tags. Values that are texts are passed on as they come, others when they are complete.

    A value ends at its end tag; if that is missing, at the tag of the next argument, or at the end of call and block. A call
    also ends where something other than a tag follows an argument: that is text.
    """

    TAGS: ClassVar[Tags]

    def __init_subclass__(cls) -> None:
        cls.MARKERS = cls.TAGS.in_text
        cls.ENDS = frozenset({cls.TAGS.block_end})
        cls.ENDS_OF_REASONING = cls.__dict__.get("ENDS_OF_REASONING", (cls.TAGS.block,))
        cls.SPECIAL = cls.SPECIAL or cls.TAGS.all
        cls.TAGS_OF_CALLS = cls.TAGS.all
        cls.CALLS = cls.__dict__.get("CALLS") or (cls.TAGS.syntax,)

    def __init__(self, tools: Tools) -> None:
        super().__init__(tools)
        self._word = ""
        """The name of the call or argument, as far as it was read."""
        self._arguments = 0
        self._types = STRING
        self._parts: list[str] = []
        """The value, if it is passed on when it is complete."""
        self._line_start = False
        """The value has not started: its tags may end with a newline."""
        self._newline = ""
        """The newline at the end of a text value so far."""
        self._value_end = self.TAGS.value_end
        self._value_ends = self.TAGS.value_ends

    def finish(self) -> Sequence[Event]:
        if self._phase in (self._members, self._key, self._before_value):
            self._end_call()
            self._phase = self._after
        elif self._phase == self._value:
            if self.TAGS.call_end and self._rest.startswith(self.TAGS.call_end):
                self._end_value()
                self._end_call()
            else:
                rest = "".join(self._parts) + self._newline + self._rest
                self._events.arguments(json_text(rest) if self._types == STRING else rest)
            self._phase = self._after
        return super().finish()

    def _on_marker(self, marker: str) -> None:
        self._word = ""
        super()._on_marker(marker)
        if marker == (self.TAGS.call or self.TAGS.block):
            self._phase = self._name

    def _head(self, text: str, at: int) -> int:
        """Expect the tag of a call in its block."""
        if text[at] in SPACE:
            return self._skip(text[at], at)
        end = self.TAGS.calls.at(text, at)
        if end == at:
            return self._hold(text, at)
        if end < 0:
            return self._no_call(text, at)
        self._opening.append(text[at:end])
        self._phase = self._name
        return end

    def _name(self, text: str, at: int) -> int:
        left = MAX_NAME - len(self._word)
        start, end = self.TAGS.name_end.find(text, at, left)
        most = at + left
        self._opening.append(text[at : min(start, most)])
        self._word += text[at : min(start, most)]
        if start > most:
            return self._not_a_call(most)
        if start == end:
            return self._hold(text, start)
        name = unquoted(self._word)
        if name not in self._tools:
            return self._no_call(text, start)
        self._opening.clear()
        self._events.start(name)
        self._schema = self._tools[name]
        self._arguments = 0
        self._phase = self._members
        return start if self.TAGS.name_ends_before else end

    def _members(self, text: str, at: int) -> int:
        """Expect the tag of an argument, or the end of the call."""
        if text[at] in SPACE:
            return at + 1
        tags = self.TAGS
        end = tags.members.at(text, at)
        if end == at:
            return self._hold(text, at)
        marker = text[at:end] if end > at else ""
        if marker == tags.key:
            self._word = ""
            self._phase = self._key
            return end
        self._end_call()
        if marker == tags.block_end:
            self._awaits_end = False
        elif marker:
            self._phase = self._after
        return max(at, end)

    def _end_call(self) -> None:
        self._events.arguments("}" if self._arguments else "{}")
        self._awaits_end = True
        self._phase = self._text

    def _after(self, text: str, at: int) -> int:
        """Expect the next call of the block, or the end of the block."""
        if text[at] in SPACE:
            return self._skip(text[at], at)
        end = self.TAGS.after_call.at(text, at)
        if end == at:
            return self._hold(text, at)
        if end < 0:
            return self._not_a_call(at)
        self._opening.clear()
        self._phase = self._text
        self._on_marker(text[at:end])
        return end

    def _key(self, text: str, at: int) -> int:
        left = MAX_NAME - len(self._word)
        start, end = self.TAGS.key_end.find(text, at, left)
        most = at + left
        self._word += text[at : min(start, most)]
        if start > most:
            self._end_call()
            self._events.text(self.TAGS.key + self._word)
            return most
        if start == end:
            return self._hold(text, start)
        self._phase = self._before_value
        if not self.TAGS.value:
            self._begin_value()
        return end

    def _before_value(self, text: str, at: int) -> int:
        if text[at] in SPACE:
            return at + 1
        end = self.TAGS.values.at(text, at)
        if end == at:
            return self._hold(text, at)
        if end < 0:
            self._end_call()
            return at
        self._begin_value()
        return end

    def _begin_value(self) -> None:
        key, self._types = self._argument()
        before = ", " if self._arguments else "{"
        opening = '"' if self._types == STRING else ""
        self._events.arguments(f"{before}{json.dumps(key, ensure_ascii=False)}: {opening}")
        self._arguments += 1
        self._parts.clear()
        self._newline = ""
        self._line_start = self.TAGS.lines
        self._phase = self._value

    def _argument(self) -> tuple[str, frozenset[str]]:
        """Return the name and the types of the argument."""
        key = unquoted(self._word)
        return key, argument_types(self._schema, key)

    def _value_as_json(self, value: str) -> str:
        return value_as_json(value, self._types)

    def _value(self, text: str, at: int) -> int:
        start, end = self._value_ends.find(text, at)
        self._add_value(text[at:start])
        if start == end:
            return self._hold(text, start)
        marker = text[start:end]
        if marker == self.TAGS.call_end:
            ends = self._ends_block(text, end)
            if ends is None:
                return self._hold(text, start)
            if not ends:
                self._add_value(marker)
                return end
        self._end_value()
        self._phase = self._members
        return end if marker == self._value_end else start

    def _ends_block(self, text: str, at: int) -> bool | None:
        """Return True if the end of the block follows; None if more text will show."""
        gap = at
        while gap < min(len(text), at + _MAX_GAP) and text[gap] in SPACE:
            gap += 1
        end = self.TAGS.block_ends.at(text, gap)
        return None if end == gap else end > gap

    def _add_value(self, piece: str) -> None:
        if not piece:
            return
        if self._line_start:
            self._line_start = False
            piece = piece.removeprefix("\n")
        if self._types == NULL_OR_STRING and not may_be_null(held := "".join(self._parts) + piece):
            self._types = STRING
            self._parts.clear()
            self._events.arguments('"')
            piece = held
        if self._types != STRING:
            self._parts.append(piece)
            return
        piece = self._newline + piece
        self._newline = "\n" if self.TAGS.lines and piece.endswith("\n") else ""
        self._events.arguments(json_text(piece[: len(piece) - len(self._newline)]))

    def _end_value(self) -> None:
        if self._types == STRING:
            self._events.arguments('"')
        else:
            value = "".join(self._parts)
            self._events.arguments(self._value_as_json(value.removesuffix("\n") if self.TAGS.lines else value))


def _qwen_tags(start: str, end: str) -> Tags:
    return Tags(
        block=(start, end),
        call=(QWEN_FUNCTION, ">", "</function>"),
        key=("<parameter=", ">"),
        value=("", "</parameter>"),
        lines=True,
    )


class Qwen3CoderParser(TaggedParser):
    """Qwen3-Coder, Qwen3.5 and later, Nemotron 3."""

    TAGS = _qwen_tags("<tool_call>", "</tool_call>")


class SeedParser(TaggedParser):
    """Format `seed_oss`: Qwen3-Coder's in other blocks."""

    TAGS = _qwen_tags(SEED_BLOCK, "</seed:tool_call>")


class GlmParser(TaggedParser):
    """GLM-4.5 and later."""

    TAGS = Tags(
        block=("<tool_call>", "</tool_call>"), key=(GLM_KEY, "</arg_key>"), value=("<arg_value>", "</arg_value>")
    )


class MiniMaxParser(TaggedParser):
    """Format `minimax_m2`: the calls of MiniMax-M2."""

    TAGS = Tags(
        block=(MINIMAX_BLOCK, "</minimax:tool_call>"),
        call=("<invoke name=", ">", "</invoke>"),
        key=("<parameter name=", ">"),
        value=("", "</parameter>"),
        quote='"',
    )


def _hunyuan_tags(suffix: str = "") -> Tags:
    return Tags(
        block=(f"<tool_calls{suffix}>", f"</tool_calls{suffix}>"),
        call=(f"<tool_call{suffix}>", f"<tool_sep{suffix}>", f"</tool_call{suffix}>"),
        key=(f"<arg_key{suffix}>", f"</arg_key{suffix}>"),
        value=(f"<arg_value{suffix}>", f"</arg_value{suffix}>"),
    )


class Hunyuan3Parser(TaggedParser):
    """Format `hy_v3`. Released models write a suffix in the tags, `<tool_call:opensource>`; it is taken out before they are read."""

    TAGS = _hunyuan_tags()
    _SUFFIXED = _hunyuan_tags(HUNYUAN_SUFFIX)
    SPECIAL = TAGS.all | _SUFFIXED.all
    ENDS_OF_REASONING = (TAGS.block, _SUFFIXED.block)
    CALLS = (TAGS.syntax, _SUFFIXED.syntax)
    _TAGS_WITH_SUFFIX = Markers(sorted(_SUFFIXED.all))

    def __init__(self, tools: Tools) -> None:
        super().__init__(tools)
        self._partial = ""
        """The end of the last piece, which may be the start of a tag with the suffix."""

    def feed(self, text: str) -> Sequence[Event]:
        text, plain, end = self._partial + text, list[str](), 0
        while True:
            at = end
            start, end = self._TAGS_WITH_SUFFIX.find(text, at)
            plain += text[at:start], text[start:end].replace(HUNYUAN_SUFFIX, "")
            if start == end:
                break
        self._partial = text[start:]
        return super().feed("".join(plain))

    def finish(self) -> Sequence[Event]:
        return [*super().feed(self._partial), *super().finish()]


def unquoted(name: str) -> str:
    return name.strip().strip("\"'")
