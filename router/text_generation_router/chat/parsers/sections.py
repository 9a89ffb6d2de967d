"""Tool calls in sections: a name and a JSON object between special tokens.

DeepSeek V3, R1     <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\\n```json\\n{…}\\n```<｜tool▁call▁end｜>\\n
                    <｜tool▁calls▁end｜>
DeepSeek V3.1       <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{…}<｜tool▁call▁end｜><｜tool▁calls▁end｜>
Kimi K2             <|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{…}
                    <|tool_call_end|><|tool_calls_section_end|>
"""

from typing import ClassVar, Final

from text_generation_router.chat.parsers.base import CallParser, Markers, Tools
from text_generation_router.chat.parsers.readers import MAX_NAME, SPACE, CallReader
from text_generation_router.chat.parsers.syntax import CallSyntax, Pattern, Slot

DEEPSEEK_CALLS: Final = "<｜tool▁calls▁begin｜>"
KIMI_CALLS: Final = "<|tool_calls_section_begin|>"

_FENCE: Final = "```"


class SectionParser(CallParser):
    """Reads calls in sections. The end tokens may be missing; without a call before them, they are text."""

    SECTION: ClassVar[tuple[str, str]]
    CALL: ClassVar[tuple[str, str]]
    SEPARATOR: ClassVar[str]
    """Follows the name, or the kind of the call."""

    def __init_subclass__(cls) -> None:
        cls.MARKERS = Markers((*cls.SECTION, *cls.CALL))
        cls.ENDS = frozenset((cls.SECTION[1], cls.CALL[1]))
        cls.SPECIAL = frozenset((*cls.SECTION, *cls.CALL, cls.SEPARATOR))

    def __init__(self, tools: Tools) -> None:
        super().__init__(tools)
        self._open: set[str] = set()
        """End tokens that are awaited."""

    def _on_marker(self, marker: str) -> None:
        if marker in (self.SECTION[0], self.CALL[0]):
            self._opening = [marker]
            self._phase = self._named if marker == self.CALL[0] else self._head
        elif marker in self._open:
            self._open.discard(marker)
            self._events.drop_blanks()
        else:
            self._events.text(marker)

    def _head(self, text: str, at: int) -> int:
        """Expect a call in its section. Text before it is dropped."""
        end = self.MARKERS.at(text, at)
        if end == at:
            return self._hold(text, at)
        if end < at:
            self._skip(text[at], at)
            return at + 1 if len(self._opening) < MAX_NAME else self._not_a_call(at + 1)
        if text[at:end] != self.CALL[0]:
            return self._no_call(text, at)
        self._opening.append(self.CALL[0])
        self._phase = self._named
        return end

    def _call_name(self, opening: str) -> str:
        kind, _, rest = opening.rpartition(self.CALL[0])[2].partition(self.SEPARATOR)
        return rest.strip().removesuffix(f"{_FENCE}json").strip() or kind.strip()

    def _arguments_reader(self) -> CallReader:
        self._open = {self.CALL[1], self.SECTION[1]}
        return super()._arguments_reader()

    def _after(self, text: str, at: int) -> int:
        """Expect the end of the call; a fence is a part of it."""
        char = text[at]
        if char in SPACE or char == _FENCE[0]:
            return self._skip(char, at)
        end = self.MARKERS.at(text, at)
        if end == at:
            return self._hold(text, at)
        if end > at:
            self._opening.clear()
        return self._not_a_call(at)


class DeepSeekParser(SectionParser):
    """DeepSeek V3, R1 and V3.1."""

    SECTION = (DEEPSEEK_CALLS, "<｜tool▁calls▁end｜>")
    CALL = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
    SEPARATOR = "<｜tool▁sep｜>"
    CALLS = (
        CallSyntax((CALL[0], Slot.NAME, SEPARATOR, Slot.ARGUMENTS, CALL[1]), (SECTION[0],), (), (SECTION[1],)),
        CallSyntax(
            (CALL[0], "function", SEPARATOR, Slot.NAME, f"\n{_FENCE}json\n", Slot.ARGUMENTS, f"\n{_FENCE}", CALL[1]),
            (SECTION[0],),
            ("\n",),
            (SECTION[1],),
        ),
    )


class KimiParser(SectionParser):
    """Kimi K2, whose calls have an id: `functions.NAME:0`."""

    SECTION = (KIMI_CALLS, "<|tool_calls_section_end|>")
    ENDS_OF_REASONING = (KIMI_CALLS,)
    CALL = ("<|tool_call_begin|>", "<|tool_call_end|>")
    SEPARATOR = "<|tool_call_argument_begin|>"
    CALLS = (
        CallSyntax(
            (CALL[0], "functions.", Slot.NAME, ":", Pattern("[0-9]{1,3}"), SEPARATOR, Slot.ARGUMENTS, CALL[1]),
            (SECTION[0],),
            (),
            (SECTION[1],),
        ),
    )

    def _call_name(self, opening: str) -> str:
        name, _, number = super()._call_name(opening).removeprefix("functions.").rpartition(":")
        return name or number
