"""What a model's answer is made of, whoever asked: text, reasoning, tool calls. Dialects write these down, parsers find them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More of the answer's text; never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of what the model thinks before it answers; never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A tool call begins. Calls are numbered 0, 1, …; one ends where the next begins or the answer ends."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """More of a call's arguments. The fragments of a call, joined, are one JSON object; never empty."""

    index: int
    fragment: str


Event = TextDelta | ReasoningDelta | ToolCallStart | ToolCallArguments


class OutputParser(Protocol):
    """Turns one answer's text, piece by piece, into events. However the text is cut, the joined events are the same."""

    def feed(self, text: str) -> Sequence[Event]:
        """What `text` makes certain; what may still become a marker is held back."""
        ...

    def finish(self) -> Sequence[Event]:
        """The rest. A call that is not whole is told as far as it came: its end says `length`, never `tool_calls`."""
        ...

    @property
    def markers(self) -> frozenset[str]:
        """Texts of special tokens that must be fed although special tokens are no text (`[TOOL_CALLS]`)."""
        ...
