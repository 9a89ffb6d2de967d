"""No calls: all of the answer is text."""

from __future__ import annotations

from collections.abc import Sequence

from text_generation_router.chat.events import Event, TextDelta


class PlainParser:
    """Passes text on: alone for an answer read whole, or inside the parser of reasoning. Plain streams need no parser."""

    __slots__ = ()

    @property
    def markers(self) -> frozenset[str]:
        return frozenset()

    def feed(self, text: str) -> Sequence[Event]:
        return (TextDelta(text),) if text else ()

    def finish(self) -> Sequence[Event]:
        return ()
