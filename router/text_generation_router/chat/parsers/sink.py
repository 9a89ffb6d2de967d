"""Where a parser writes what it found: neighbours of a kind become one event, calls are numbered, blanks wait."""

from __future__ import annotations

from text_generation_router.chat.events import Event, TextDelta, ToolCallArguments, ToolCallStart


class Sink:
    """The events of one answer. Text that is only whitespace before, between or after calls is none."""

    def __init__(self) -> None:
        self.calls = 0
        self.has_arguments = False
        """The last call has some."""
        self._events: list[Event] = []
        self._parts: list[str] = []
        self._parts_are_text = True
        self._blanks: list[str] = []
        """Whitespace since the last call or the beginning: text if more text follows, or if there are no calls."""
        self._in_text = False

    def text(self, text: str) -> None:
        """More of the answer's text; may be empty."""
        if self._in_text or not text:
            self._add(text)
        elif text.isspace():
            self._blanks.append(text)
        else:
            self._in_text = True
            self._add("".join(self._blanks) + text)
            self._blanks.clear()

    def start(self, name: str) -> None:
        """The next call begins."""
        self._blanks.clear()
        self._in_text = False
        self._flush()
        self._events.append(ToolCallStart(self.calls, name))
        self._parts_are_text = False
        self.calls += 1
        self.has_arguments = False

    def arguments(self, fragment: str) -> None:
        """More of the last call's arguments; may be empty. There must have been a call, and no text since."""
        if fragment:
            self.has_arguments = True
            self._parts.append(fragment)

    def drop_blanks(self) -> None:
        """Whitespace since the last call belongs to the call's frame."""
        if not self._in_text:
            self._blanks.clear()

    def finish(self) -> None:
        """The answer is over."""
        if not self.calls:
            self._add("".join(self._blanks))
        self._blanks.clear()

    def drain(self) -> list[Event]:
        """The events since the last time."""
        if self._parts:
            self._flush()
        events = self._events
        if events:
            self._events = []
        return events

    def _add(self, text: str) -> None:
        if not text:
            return
        if not self._parts_are_text:
            self._flush()
            self._parts_are_text = True
        self._parts.append(text)

    def _flush(self) -> None:
        if self._parts:
            joined = "".join(self._parts)
            self._parts.clear()
            self._events.append(
                TextDelta(joined) if self._parts_are_text else ToolCallArguments(self.calls - 1, joined)
            )
