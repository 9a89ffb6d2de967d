"""Gemma 4: `<|channel>thought\\n…<channel|>` for reasoning, `<|tool_call>call:NAME{key:<|"|>text<|"|>}<tool_call|>` for calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from text_generation_router.chat.events import Event
from text_generation_router.chat.parsers.base import CallParser, Markers, Tools
from text_generation_router.chat.parsers.literals import GEMMA, LiteralCallReader
from text_generation_router.chat.parsers.readers import MAX_NAME

GEMMA_CALL: Final = "<|tool_call>"
_CALL_END: Final = "<tool_call|>"
_CHANNEL: Final = "<|channel>"
_CHANNEL_END: Final = "<channel|>"
_THOUGHT: Final = "thought\n"


class Gemma4Parser(CallParser):
    """Reads calls and reasoning. The end tokens may be missing; without a start before it, that of a call is text."""

    TEXT_MARKERS = Markers((GEMMA_CALL, _CALL_END, _CHANNEL, _CHANNEL_END))
    RAW_MARKERS = TEXT_MARKERS
    SPECIAL = frozenset({GEMMA_CALL, _CALL_END, _CHANNEL, _CHANNEL_END, GEMMA.mark})
    _ENDS_OF_REASONING = Markers((_CHANNEL_END, GEMMA_CALL))

    def __init__(self, tools: Tools) -> None:
        super().__init__(tools)
        self._awaits_end = False
        self._held = ""
        """The name of the channel, then the newline at the end of the reasoning, as far as they were read."""
        self._named = False
        """The name of the channel was read."""

    def finish(self) -> Sequence[Event]:
        if self._phase == self._reasoning:
            self._events.reason(self._held + self._rest if self._named else "")
            self._phase = self._after
        return super().finish()

    def _on_marker(self, marker: str) -> None:
        if marker == GEMMA_CALL:
            super()._on_marker(marker)
        elif marker == _CHANNEL:
            self._held = ""
            self._named = False
            self._phase = self._reasoning
        elif marker == _CALL_END and not self._awaits_end:
            self._events.text(marker)
        else:
            self._events.drop_blanks()
        self._awaits_end = False

    def _reasoning(self, text: str, at: int) -> int:
        start, end = self._ENDS_OF_REASONING.find(text, at)
        self._reason(text[at:start])
        if start == end:
            return self._hold(text, start)
        if not self._named and self._held.strip() != _THOUGHT.strip():
            self._events.reason(self._held)
        if text[start:end] == GEMMA_CALL:
            self._phase = self._text
            return start
        self._phase = self._after_reasoning
        return end

    def _reason(self, piece: str) -> None:
        piece = self._held + piece
        if not self._named:
            self._held = piece
            if _THOUGHT.startswith(piece):
                return
            self._named = True
            piece = piece.removeprefix(_THOUGHT)
        self._held = "\n" if piece.endswith("\n") else ""
        self._events.reason(piece.removesuffix("\n"))

    def _after_reasoning(self, text: str, at: int) -> int:
        if text[at] == "\n":
            return at + 1
        self._phase = self._text
        return at

    def _head(self, text: str, at: int) -> int:
        """Read from `call:` to the arguments."""
        char = text[at]
        if char != "{":
            self._skip(char, at)
            return at + 1 if len(self._opening) < 2 * MAX_NAME else self._not_a_call(at + 1)
        name = "".join(self._opening).removeprefix(GEMMA_CALL).strip().removeprefix("call:").strip()
        if name not in self._tools:
            return self._not_a_call(at)
        self._events.start(name)
        self._read(LiteralCallReader(self._events, GEMMA))
        return at

    def _after(self, text: str, at: int) -> int:
        self._awaits_end = True
        return super()._after(text, at)
