"""A model that was told of its tools in words: an answer that is one JSON object, maybe in a fence, is a call."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from text_generation_router.chat.parsers.base import CallParser
from text_generation_router.chat.parsers.scan import SPACE
from text_generation_router.chat.parsers.tgi import AnyCallReader

FENCE: Final = "```"
_OPENINGS: Final = ("", FENCE, f"{FENCE}json")


class JsonAnswerParser(CallParser):
    """One call at the start of the answer, in either form, or all of it is text. What follows the call is text."""

    READER = AnyCallReader

    def __init__(self, tool_names: Collection[str]) -> None:
        super().__init__(tool_names)
        self._fence = ""
        """Of the opening fence, what was read."""
        self._to_close = ""
        """Of the closing fence, what has still to come."""
        self._phase = self._head

    def _head(self, text: str, at: int) -> int:
        char = text[at]
        if char not in SPACE and char != "{":
            self._fence += char
            return self._skip(char, at) if _OPENINGS[-1].startswith(self._fence) else self._give_up(at)
        if self._fence not in _OPENINGS:
            return self._give_up(at)
        self._to_close = FENCE if self._fence else ""
        return super()._head(text, at)

    def _after(self, text: str, at: int) -> int:
        char = text[at]
        if char in SPACE:
            return self._skip(char, at)
        if not self._to_close.startswith(char):
            return self._give_up(at)
        self._to_close = self._to_close[1:]
        self._skip(char, at)
        if not self._to_close:
            self._opening.clear()
        return at + 1
