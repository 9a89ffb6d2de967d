"""The first tool call of an answer, for clients that take one."""

from __future__ import annotations

from collections.abc import Sequence

from text_generation_router.chat.events import Event, OutputParser, ToolCallArguments, ToolCallStart


class FirstCall:
    """A parser that drops all but the first tool call of `inner`."""

    def __init__(self, inner: OutputParser) -> None:
        self._inner = inner

    @property
    def markers(self) -> frozenset[str]:
        return self._inner.markers

    def feed(self, text: str) -> Sequence[Event]:
        return _without_further_calls(self._inner.feed(text))

    def finish(self) -> Sequence[Event]:
        return _without_further_calls(self._inner.finish())


def _without_further_calls(events: Sequence[Event]) -> Sequence[Event]:
    return [event for event in events if not isinstance(event, ToolCallStart | ToolCallArguments) or event.index == 0]
