"""Mistral: `[TOOL_CALLS]` and an array of calls, or, newer, `[TOOL_CALLS]name[ARGS]{…}` for each call."""

from __future__ import annotations

from typing import Final

from text_generation_router.chat.parsers.base import ArrayParser
from text_generation_router.chat.parsers.calls import MAX_NAME, ArgumentsReader
from text_generation_router.chat.parsers.markers import Markers
from text_generation_router.chat.parsers.scan import SPACE

CALLS: Final = "[TOOL_CALLS]"
CALL_ID: Final = "[CALL_ID]"
ARGS: Final = "[ARGS]"


class MistralParser(ArrayParser):
    """The newer form may have `[CALL_ID]` and an id after the name (it is skipped), or lack `[ARGS]`."""

    TEXT_MARKERS = RAW_MARKERS = Markers((CALLS,))
    SPECIAL = frozenset({CALLS, CALL_ID, ARGS})

    def _head(self, text: str, at: int) -> int:
        if self._in_array or text[at] in SPACE or text[at] in "[{":
            return super()._head(text, at)
        self._phase = self._named
        return at

    def _named(self, text: str, at: int) -> int:
        """From the name up to the arguments."""
        char = text[at]
        is_object = char == "{"
        if not is_object:
            self._skip(char, at)
            if len(self._opening) > MAX_NAME + len(CALL_ID + ARGS):
                return self._give_up(at + 1)
            if char != "]":
                return at + 1
        head = "".join(self._opening).removeprefix(CALLS)
        if not is_object and not head.endswith(ARGS):
            return at + 1
        name = head.removesuffix(ARGS).partition(CALL_ID)[0].strip()
        if name not in self._names:
            return self._give_up(at + (not is_object))
        self._sink.start(name)
        self._read(ArgumentsReader(self._sink))
        return at + (not is_object)
