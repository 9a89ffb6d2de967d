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
