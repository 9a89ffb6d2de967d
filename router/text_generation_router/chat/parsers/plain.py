"""No calls: all of the answer is text."""

from __future__ import annotations

from collections.abc import Sequence

from text_generation_router.chat.events import Event, TextDelta


class PlainParser:
    """Passes text on. Every chat stream without tools runs through it, so it does nothing else."""

    __slots__ = ()

    @property
    def markers(self) -> frozenset[str]:
        return frozenset()

    def feed(self, text: str) -> Sequence[Event]:
        return (TextDelta(text),) if text else ()

    def finish(self) -> Sequence[Event]:
        return ()
