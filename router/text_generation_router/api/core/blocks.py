"""What Responses and Messages have in common: an answer is a row of blocks, told one after the other.

    events ──► Script ──► bytes of a stream, and the whole reply that they add up to

One script tells both, so that a stream cannot say anything else than a whole reply.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

from text_generation_router.api.core.chat import AnswerEnd, Finish
from text_generation_router.chat.events import Event, ReasoningDelta, TextDelta, ToolCallArguments, ToolCallStart
from text_generation_router.errors import ServingError

Json = dict[str, Any]


class Kind(Enum):
    """What a block holds."""

    TEXT = "text"
    REASONING = "reasoning"
    CALL = "call"


CachedTokens = Callable[[], int]
"""How many of the prompt's tokens were found in the KV cache; known once the first token comes, 0 before."""


class Script(ABC):
    """Writes one answer down. A block is open from its first delta until another begins or the answer ends.

    Every method returns what it adds to a stream, whole events; `end` or `failed` is the last call.
    """

    def __init__(self) -> None:
        self.blocks: list[Json] = []
        """The closed blocks, as the whole reply has them."""
        self._begun = False
        self._open: Kind | None = None
        self._parts: list[str] = []
        """The deltas of the open block."""

    def text(self, delta: str) -> bytes:
        """More text."""
        # The hot path of both dialects.
        if self._open is Kind.TEXT:
            self._parts.append(delta)
            return self.text_delta(delta)
        opening = self._turn_to(Kind.TEXT)
        self._parts.append(delta)
        return opening + self.text_delta(delta)

    def events(self, events: Sequence[Event]) -> bytes:
        """What a parser found."""
        return b"".join([self._event(event) for event in events])

    def end(self, end: AnswerEnd) -> bytes:
        """The answer ended; one that said nothing has an empty text."""
        last = b"" if self._open or self.blocks else self._turn_to(Kind.TEXT)
        last += self._close(whole=end.finish is not Finish.LENGTH)
        return last + self.ended(end)

    def failed(self, error: ServingError) -> bytes:
        """The answer failed after a part of it, perhaps nothing but silence, was sent."""
        return self._begin() + self.failure(error)

    @abstractmethod
    def whole(self) -> Json:
        """The whole reply. Asked for after `end`."""

    @abstractmethod
    def begin(self) -> bytes:
        """Before anything else."""

    @abstractmethod
    def block_began(self, kind: Kind, name: str) -> bytes:
        """A block begins; `name` is a call's."""

    @abstractmethod
    def text_delta(self, delta: str) -> bytes:
        """More of the open text."""

    @abstractmethod
    def reasoning_delta(self, delta: str) -> bytes:
        """More of the open reasoning."""

    @abstractmethod
    def arguments_delta(self, delta: str) -> bytes:
        """More of the open call's arguments."""

    @abstractmethod
    def block_ended(self, kind: Kind, text: str, *, whole: bool) -> tuple[Json, bytes]:
        """A block ends with all that it holds: as the whole reply has it, and for the stream.

        `whole` False: the answer was cut short in it.
        """

    @abstractmethod
    def ended(self, end: AnswerEnd) -> bytes:
        """After the last block."""

    @abstractmethod
    def failure(self, error: ServingError) -> bytes:
        """In place of the rest. A block may be open."""

    def cut_off(self) -> bytes:
        """Close the open block, if there is one, as one that is not whole."""
        return self._close(whole=False)

    def _event(self, event: Event) -> bytes:
        match event:
            case TextDelta(text):
                return self.text(text)
            case ReasoningDelta(text):
                opening = b"" if self._open is Kind.REASONING else self._turn_to(Kind.REASONING)
                self._parts.append(text)
                return opening + self.reasoning_delta(text)
            case ToolCallStart(_, name):
                return self._turn_to(Kind.CALL, name)
            case ToolCallArguments(_, fragment):
                self._parts.append(fragment)
                return self.arguments_delta(fragment)

    def _begin(self) -> bytes:
        if self._begun:
            return b""
        self._begun = True
        return self.begin()

    def _turn_to(self, kind: Kind, name: str = "") -> bytes:
        before = self._begin() + self._close(whole=True)
        self._open = kind
        return before + self.block_began(kind, name)

    def _close(self, *, whole: bool) -> bytes:
        if self._open is None:
            return b""
        kind, text = self._open, "".join(self._parts)
        self._open, self._parts = None, []
        block, told = self.block_ended(kind, text, whole=whole)
        self.blocks.append(block)
        return told
