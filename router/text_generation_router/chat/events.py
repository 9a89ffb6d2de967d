"""The events of a model's answer: text, reasoning, tool calls. Parsers produce them, dialects write them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Text of the answer; never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """Text of the reasoning before the answer; never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """The start of a tool call. Calls are numbered 0, 1, …; a call ends where the next one starts or the answer ends."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """A part of a call's arguments; never empty. The fragments of a call, joined, are one JSON object."""

    index: int
    fragment: str


Event = TextDelta | ReasoningDelta | ToolCallStart | ToolCallArguments


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
        if isinstance(events[0], ReasoningDelta):
            self.count += 1 + self._held * self._open
        self._held, self._open = 0, isinstance(events[-1], ReasoningDelta)


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
        self._kind: type[Event] = TextDelta
        """The kind of event that the parts make."""
        self._blanks: list[str] = []
        """Whitespace since the last call or the start: text if more text follows, or if there are no calls."""
        self._in_text = False

    def text(self, text: str) -> None:
        """Add text of the answer; may be empty."""
        if self._in_text or not text:
            self._add(text, TextDelta)
        elif text.isspace():
            self._blanks.append(text)
        else:
            self._in_text = True
            self._add("".join(self._blanks) + text, TextDelta)
            self._blanks.clear()

    def reason(self, text: str) -> None:
        """Add reasoning; may be empty."""
        self._in_text = False
        self._add(text, ReasoningDelta)

    def start(self, name: str) -> None:
        """Start the next call."""
        self._blanks.clear()
        self._in_text = False
        self._flush()
        self._events.append(ToolCallStart(self.calls, name))
        self.calls += 1
        self.has_arguments = False

    def arguments(self, fragment: str) -> None:
        """Add to the arguments of the last call; may be empty. Needs a call with no text after it."""
        if fragment:
            self.has_arguments = True
            self._add(fragment, ToolCallArguments)

    def drop_blanks(self) -> None:
        """Drop the whitespace since the last call: it belongs to the markers of the call."""
        if not self._in_text:
            self._blanks.clear()

    def finish(self) -> None:
        if not self.calls:
            self._add("".join(self._blanks), TextDelta)
        self._blanks.clear()

    def drain(self) -> list[Event]:
        """Return the events since the last `drain`."""
        if self._parts:
            self._flush()
        events = self._events
        if events:
            self._events = []
        return events

    def _add(self, text: str, kind: type[Event]) -> None:
        if not text:
            return
        if kind is not self._kind:
            self._flush()
            self._kind = kind
        self._parts.append(text)

    def _flush(self) -> None:
        if not self._parts:
            return
        joined = "".join(self._parts)
        self._parts.clear()
        if self._kind is ToolCallArguments:
            self._events.append(ToolCallArguments(self.calls - 1, joined))
        else:
            self._events.append(ReasoningDelta(joined) if self._kind is ReasoningDelta else TextDelta(joined))
