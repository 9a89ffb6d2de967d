"""Answers of Responses and Messages: a list of blocks, written one after the other.

    events ──► ReplyWriter ──► bytes of a stream, and the whole reply

A writer makes both, so a stream and a whole reply never differ.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Generic, TypeVar

from text_generation_router.api.core.chat import AnswerEnd, Finish
from text_generation_router.chat.events import Event, ReasoningDelta, TextDelta, ToolCallArguments, ToolCallStart
from text_generation_router.errors import ServingError
from text_generation_router.generation import TokenOutput

BlockT = TypeVar("BlockT")
"""A block as the whole reply has it."""


class Kind(Enum):
    """The content of a block."""

    TEXT = "text"
    REASONING = "reasoning"
    CALL = "call"


CachedTokens = Callable[[], int]
"""Returns the prompt tokens found in the KV cache; 0 before the first token."""


class ReplyWriter(ABC, Generic[BlockT]):
    """Writes one answer. A block is open from its first delta until another begins or the answer ends.

    Every method returns whole events for the stream; `end` or `failed` is the last call.
    """

    scored = False
    """True if the answer has log-probabilities: `score` is called with each token before its text or its events."""

    def __init__(self) -> None:
        self.blocks: list[BlockT] = []
        """The closed blocks of the whole reply."""
        self._begun = False
        self._open: Kind | None = None
        self._parts: list[str] = []
        """The deltas of the open block."""

    def add(self, delta: str, kind: Kind = Kind.TEXT) -> bytes:
        """Add to the block of this kind."""
        # Called for each token of both dialects.
        opening = b"" if self._open is kind else self._switch_to(kind)
        self._parts.append(delta)
        return opening + self.delta(delta)

    def score(self, output: TokenOutput) -> None:
        """Take the next token."""
        raise NotImplementedError

    def events(self, events: Sequence[Event]) -> bytes:
        """Add the events of a parser."""
        return b"".join([self._event(event) for event in events])

    def end(self, end: AnswerEnd) -> bytes:
        """End the answer. An answer without blocks gets an empty text."""
        last = b"" if self._open or self.blocks else self._switch_to(Kind.TEXT)
        last += self._close(whole=end.finish is not Finish.LENGTH)
        return last + self.ended(end)

    def failed(self, error: ServingError) -> bytes:
        """End the stream with an error."""
        return self._begin() + self.failure(error)

    @abstractmethod
    def whole(self) -> object:
        """Return the whole reply. Call after `end`."""

    @abstractmethod
    def begin(self) -> bytes:
        """Return the first events of the stream."""

    @abstractmethod
    def block_began(self, kind: Kind, name: str) -> bytes:
        """Open a block; `name` is that of a tool call."""

    @abstractmethod
    def delta(self, delta: str) -> bytes:
        """Add to the open block: text, reasoning, or the arguments of a tool call."""

    @abstractmethod
    def block_ended(self, text: str, *, whole: bool) -> tuple[BlockT, bytes]:
        """Close the block with this text: return the block of the whole reply, and the events.

        `whole` is False if the answer was cut off inside the block.
        """

    @abstractmethod
    def ended(self, end: AnswerEnd) -> bytes:
        """Return the events after the last block."""

    @abstractmethod
    def failure(self, error: ServingError) -> bytes:
        """Return the events of an error. A block may be open."""

    def _event(self, event: Event) -> bytes:
        match event:
            case TextDelta(text):
                return self.add(text)
            case ReasoningDelta(text):
                return self.add(text, Kind.REASONING)
            case ToolCallStart(_, name):
                return self._switch_to(Kind.CALL, name)
            case ToolCallArguments(_, fragment):
                return self.add(fragment, Kind.CALL)

    def _begin(self) -> bytes:
        if self._begun:
            return b""
        self._begun = True
        return self.begin()

    def _switch_to(self, kind: Kind, name: str = "") -> bytes:
        before = self._begin() + self._close(whole=True)
        self._open = kind
        return before + self.block_began(kind, name)

    def _close(self, *, whole: bool) -> bytes:
        if self._open is None:
            return b""
        text = "".join(self._parts)
        self._open, self._parts = None, []
        block, events = self.block_ended(text, whole=whole)
        self.blocks.append(block)
        return events
