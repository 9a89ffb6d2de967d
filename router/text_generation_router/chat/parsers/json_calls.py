"""Calls alone, as a grammar forces them: an object, or an array of objects, in either form."""

from __future__ import annotations

from collections.abc import Collection

from text_generation_router.chat.parsers.base import ArrayParser
from text_generation_router.chat.parsers.tgi import AnyCallReader


class JsonCallsParser(ArrayParser):
    """`{"name": …, "arguments": {…}}` or TGI's `{"function": {"_name": …, …}}`; anything else is text from there on."""

    READER = AnyCallReader

    def __init__(self, tool_names: Collection[str]) -> None:
        super().__init__(tool_names)
        self._phase = self._head
