"""The events that a parser has found: adjacent ones of a kind are joined, calls are numbered, blanks are held back."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from text_generation_router.chat.events import Event, ReasoningDelta, TextDelta, ToolCallArguments, ToolCallStart


class EventBuffer:
    """The events of one answer. Whitespace alone before, between or after calls is not text."""

    def __init__(self) -> None:
        self.calls = 0
        self.has_arguments = False
        """The last call has arguments."""
        self._events: list[Event] = []
        self._parts: list[str] = []
        self._make: Callable[[str], Event] = TextDelta
        """Makes an event of the parts."""
        self._to_arguments: Callable[[str], Event] = partial(ToolCallArguments, 0)
        """Makes the arguments of the last call."""
        self._blanks: list[str] = []
        """Whitespace since the last call or the start: text if more text follows, or if there are no calls."""
        self._in_text = False

    def text(self, text: str) -> None:
        """Add text of the answer; may be empty."""
        if self._in_text or not text:
            self._add(TextDelta, text)
        elif text.isspace():
            self._blanks.append(text)
        else:
            self._in_text = True
            self._add(TextDelta, "".join(self._blanks) + text)
            self._blanks.clear()

    def reason(self, text: str) -> None:
        """Add reasoning; may be empty."""
        self._in_text = False
        self._add(ReasoningDelta, text)

    def start(self, name: str) -> None:
        """Start the next call."""
        self._blanks.clear()
        self._in_text = False
        self._flush()
        self._events.append(ToolCallStart(self.calls, name))
        self._to_arguments = partial(ToolCallArguments, self.calls)
        self.calls += 1
        self.has_arguments = False

    def arguments(self, fragment: str) -> None:
        """Add to the arguments of the last call; may be empty. Needs a call with no text after it."""
        self.has_arguments = self.has_arguments or bool(fragment)
        self._add(self._to_arguments, fragment)

    def drop_blanks(self) -> None:
        """Drop the whitespace since the last call: it belongs to the markers of the call."""
        if not self._in_text:
            self._blanks.clear()

    def finish(self) -> None:
        """End the answer."""
        if not self.calls:
            self._add(TextDelta, "".join(self._blanks))
        self._blanks.clear()

    def drain(self) -> list[Event]:
        """Return the events since the last `drain`."""
        if self._parts:
            self._flush()
        events = self._events
        if events:
            self._events = []
        return events

    def _add(self, make: Callable[[str], Event], text: str) -> None:
        if not text:
            return
        if make is not self._make:
            self._flush()
            self._make = make
        self._parts.append(text)

    def _flush(self) -> None:
        if self._parts:
            self._events.append(self._make("".join(self._parts)))
            self._parts.clear()
