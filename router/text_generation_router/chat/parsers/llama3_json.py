"""Llama 3: `{"name": …, "parameters": {…}}` at the start of the answer or after `<|python_tag|>`; several with `;` between."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from text_generation_router.chat.parsers.base import CallParser
from text_generation_router.chat.parsers.markers import Markers

TAG: Final = "<|python_tag|>"


class Llama3JsonParser(CallParser):
    """Calls may also follow one another with nothing but whitespace between."""

    TEXT_MARKERS = RAW_MARKERS = Markers((TAG,))
    SPECIAL = frozenset({TAG})

    def __init__(self, tool_names: Collection[str]) -> None:
        super().__init__(tool_names)
        self._phase = self._head

    def _after(self, text: str, at: int) -> int:
        char = text[at]
        if char == ";" and char not in self._opening:
            return self._skip(char, at)
        return self._head(text, at)
