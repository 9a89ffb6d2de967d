"""Hermes and Qwen: `<tool_call>\\n{"name": …, "arguments": {…}}\\n</tool_call>`, anywhere in the text, as often as need be."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from text_generation_router.chat.parsers.base import CallParser
from text_generation_router.chat.parsers.markers import Markers

START: Final = "<tool_call>"
END: Final = "</tool_call>"


class HermesParser(CallParser):
    """The end tag may be missing; without a call before it, it is text. What stands between a call and its end tag is text."""

    TEXT_MARKERS = RAW_MARKERS = Markers((START, END))
    SPECIAL = frozenset({START, END})

    def __init__(self, tool_names: Collection[str]) -> None:
        super().__init__(tool_names)
        self._awaits_end = False

    def _meet(self, marker: str) -> None:
        if marker == START:
            self._awaits_end = False
            super()._meet(marker)
        elif self._awaits_end:
            self._awaits_end = False
            self._sink.drop_blanks()
        else:
            self._sink.text(marker)

    def _after(self, text: str, at: int) -> int:
        self._awaits_end = True
        return super()._after(text, at)
