"""Gemma 4: `<|channel>thought\\n…<channel|>` for reasoning, `<|tool_call>call:NAME{key:<|"|>text<|"|>}<tool_call|>` for calls.
FunctionGemma: `<start_function_call>call:NAME{key:<escape>text<escape>}<end_function_call>`.
"""

from collections.abc import Sequence
from typing import ClassVar, Final

from text_generation_router.chat.events import Event
from text_generation_router.chat.parsers.base import CallParser, Markers, Tools
from text_generation_router.chat.parsers.literals import LiteralCallReader
from text_generation_router.chat.parsers.readers import CallReader
from text_generation_router.chat.parsers.syntax import CallSyntax, Slot, Until

GEMMA_CALL: Final = "<|tool_call>"
_CALL_END: Final = "<tool_call|>"
FUNCTION_CALL: Final = "<start_function_call>"
_FUNCTION_END: Final = "<end_function_call>"
_MARK: Final = '<|"|>'
_FUNCTION_MARK: Final = "<escape>"
"""Stand around strings."""
_CHANNEL: Final = "<|channel>"
_CHANNEL_END: Final = "<channel|>"
_THOUGHT: Final = "thought\n"
GEMMA_THOUGHT: Final = (_CHANNEL, Until(_CHANNEL_END), Slot.GAP)


def _calls(start: str, end: str, mark: str) -> tuple[CallSyntax, ...]:
    return (CallSyntax((f"{start}call:", Slot.NAME, "{", Until(end, inside=(mark,))), blocks=True),)


class FunctionGemmaParser(CallParser, starts=(FUNCTION_CALL,), ends=(_FUNCTION_END,)):
    """FunctionGemma. The end tokens may be missing; without a start before it, that of a call is text."""

    MARK: ClassVar = _FUNCTION_MARK
    SPECIAL = frozenset({FUNCTION_CALL, _FUNCTION_END, _FUNCTION_MARK})
    CALLS = _calls(FUNCTION_CALL, _FUNCTION_END, _FUNCTION_MARK)

    def _head(self, text: str, at: int) -> int:
        return self._named(text, at)

    def _call_name(self, opening: str) -> str:
        return opening.removeprefix(self._opening[0]).strip().removeprefix("call:").removeprefix(":").strip()

    def _arguments_reader(self) -> CallReader:
        return LiteralCallReader(self._events, self.MARK)


class Gemma4Parser(FunctionGemmaParser, starts=(GEMMA_CALL, _CHANNEL, _CHANNEL_END), ends=(_CALL_END,)):
    """Reads also reasoning."""

    MARK = _MARK
    SPECIAL = frozenset({GEMMA_CALL, _CALL_END, _CHANNEL, _CHANNEL_END, _MARK})
    CALLS = _calls(GEMMA_CALL, _CALL_END, _MARK)
    _ENDS_OF_REASONING = Markers((_CHANNEL_END, GEMMA_CALL))

    def __init__(self, tools: Tools) -> None:
        super().__init__(tools)
        self._held = ""
        """The name of the channel, then the newline at the end of the reasoning, as far as they were read."""
        self._in_thought = False
        """The name of the channel was read."""

    def finish(self) -> Sequence[Event]:
        if self._phase == self._reasoning:
            self._events.reason(self._held + self._rest if self._in_thought else "")
            self._phase = self._after
        return super().finish()

    def _on_marker(self, marker: str) -> None:
        if marker == _CHANNEL:
            self._held = ""
            self._in_thought = False
            self._phase = self._reasoning
        elif marker != _CHANNEL_END:
            super()._on_marker(marker)

    def _reasoning(self, text: str, at: int) -> int:
        start, end = self._ENDS_OF_REASONING.find(text, at)
        self._reason(text[at:start])
        if start == end:
            return self._hold(text, start)
        if not self._in_thought and self._held.strip() != _THOUGHT.strip():
            self._events.reason(self._held)
        if text[start:end] == GEMMA_CALL:
            self._phase = self._text
            return start
        self._phase = self._after_reasoning
        return end

    def _reason(self, piece: str) -> None:
        piece = self._held + piece
        if not self._in_thought:
            self._held = piece
            if _THOUGHT.startswith(piece):
                return
            self._in_thought = True
            piece = piece.removeprefix(_THOUGHT)
        self._held = "\n" if piece.endswith("\n") else ""
        self._events.reason(piece.removesuffix("\n"))

    def _after_reasoning(self, text: str, at: int) -> int:
        if text[at] == "\n":
            return at + 1
        self._phase = self._text
        return at
