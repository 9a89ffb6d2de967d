"""The events of a model's answer: text, reasoning, tool calls. Parsers produce them, dialects write them."""

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple, Protocol


class Kind(Enum):
    """The content of a part of an answer."""

    TEXT = "text"
    REASONING = "reasoning"
    CALL = "call"
    """The start of a tool call, with the name of the tool; the call ends where the next one starts or the answer ends."""
    ARGUMENTS = "arguments"
    """A part of a call's arguments. The parts of a call, joined, are one JSON object."""


class Event(NamedTuple):
    """A part of an answer; its text is never empty."""

    kind: Kind
    text: str
    call: int = 0
    """The number of the call, from 0, with CALL and ARGUMENTS."""


class ReasoningTokens:
    """Counts the tokens of an answer that are reasoning, without its markers."""

    def __init__(self) -> None:
        self.count = 0
        self._open = False
        """The last event was reasoning."""
        self._held = 0
        """Tokens since then without an event: their text is held back."""

    def add(self, events: Sequence[Event]) -> None:
        """Count a token, by its events."""
        if not events:
            self._held += 1
            return
        if events[0].kind is Kind.REASONING:
            self.count += 1 + self._held * self._open
        self._held, self._open = 0, events[-1].kind is Kind.REASONING


class OutputParser(Protocol):
    """Turns the text of one answer, piece by piece, into events. The joined events do not depend on how the text is cut."""

    def feed(self, text: str) -> Sequence[Event]:
        """Return the events that `text` completes; text that may be the start of a marker is held back."""
        ...

    def finish(self) -> Sequence[Event]:
        """End the answer and return the rest. An incomplete call is passed on as it is; its finish reason is `length`."""
        ...

    @property
    def markers(self) -> frozenset[str]:
        """Texts of special tokens that must be fed, although special tokens are not text (`[TOOL_CALLS]`)."""
        ...


class EventBuffer:
    """The events of one answer. Whitespace alone before, between or after calls is not text."""

    def __init__(self) -> None:
        self.calls = 0
        self.has_arguments = False
        """The last call has arguments."""
        self._events: list[Event] = []
        self._parts: list[str] = []
        self._kind = Kind.TEXT
        """The kind of event that the parts make."""
        self._blanks: list[str] = []
        """Whitespace since the last call or the start: text if more text follows, or if there are no calls."""
        self._in_text = False

    def text(self, text: str) -> None:
        """Add text of the answer; may be empty."""
        if self._in_text or not text:
            self._add(text, Kind.TEXT)
        elif text.isspace():
            self._blanks.append(text)
        else:
            self._in_text = True
            self._add("".join(self._blanks) + text, Kind.TEXT)
            self._blanks.clear()

    def reason(self, text: str) -> None:
        """Add reasoning; may be empty."""
        self._in_text = False
        self._add(text, Kind.REASONING)

    def start(self, name: str) -> None:
        """Start the next call."""
        self._blanks.clear()
        self._in_text = False
        self._flush()
        self._events.append(Event(Kind.CALL, name, self.calls))
        self.calls += 1
        self.has_arguments = False

    def arguments(self, fragment: str) -> None:
        """Add to the arguments of the last call; may be empty. Needs a call with no text after it."""
        if fragment:
            self.has_arguments = True
            self._add(fragment, Kind.ARGUMENTS)

    def drop_blanks(self) -> None:
        """Drop the whitespace since the last call: it belongs to the markers of the call."""
        if not self._in_text:
            self._blanks.clear()

    def finish(self) -> None:
        if not self.calls:
            self._add("".join(self._blanks), Kind.TEXT)
        self._blanks.clear()

    def drain(self) -> list[Event]:
        """Return the events since the last `drain`."""
        self._flush()
        events = self._events
        if events:
            self._events = []
        return events

    def _add(self, text: str, kind: Kind) -> None:
        if not text:
            return
        if kind is not self._kind:
            self._flush()
            self._kind = kind
        self._parts.append(text)

    def _flush(self) -> None:
        if self._parts:
            call = self.calls - 1 if self._kind is Kind.ARGUMENTS else 0
            self._events.append(Event(self._kind, "".join(self._parts), call))
            self._parts.clear()
