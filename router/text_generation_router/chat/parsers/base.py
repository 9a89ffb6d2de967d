"""What the formats have in common: text, calls in it, and what becomes of a call that breaks off."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import ClassVar

from text_generation_router.chat.events import Event
from text_generation_router.chat.parsers.calls import CallReader, Reader
from text_generation_router.chat.parsers.markers import Markers
from text_generation_router.chat.parsers.scan import SPACE
from text_generation_router.chat.parsers.sink import Sink


class CallParser:
    """Goes through an answer in phases. A phase takes characters from `at` on, and says up to where.

    A call that breaks before its name is known was none: it is text, as written, and what follows is looked at as text.
    One that breaks in its arguments keeps the rest, as written, up to the next marker. One that breaks after them is over.
    """

    TEXT_MARKERS: ClassVar[Markers] = Markers(())
    """What is found in text: where calls begin."""
    RAW_MARKERS: ClassVar[Markers] = Markers(())
    """What ends broken arguments."""
    SPECIAL: ClassVar[frozenset[str]] = frozenset()
    READER: ClassVar[type[CallReader]] = CallReader

    def __init__(self, tool_names: Collection[str]) -> None:
        self._names = frozenset(tool_names)
        self._sink = Sink()
        self._rest = ""
        """The end of the last piece, where a marker may have begun."""
        self._opening: list[str] = []
        """What was read on the way to a call: no text if the call comes."""
        self._reader: Reader | None = None
        self._phase: Callable[[str, int], int] = self._text

    @property
    def markers(self) -> frozenset[str]:
        return self.SPECIAL

    def feed(self, text: str) -> Sequence[Event]:
        if self._rest:
            text = self._rest + text
            self._rest = ""
        at, end = 0, len(text)
        while at < end:
            at = self._phase(text, at)
        return self._sink.drain()

    def finish(self) -> Sequence[Event]:
        if self._phase == self._raw:
            self._sink.arguments(self._rest)
        elif self._phase == self._call:
            assert self._reader is not None, "a call is being read"
            if not self._reader.started:
                self._sink.text(self._reader.raw)
        elif self._phase != self._after:
            self._sink.text("".join(self._opening) + self._rest)
        self._sink.finish()
        return self._sink.drain()

    def _text(self, text: str, at: int) -> int:
        start, end = self.TEXT_MARKERS.find(text, at)
        self._sink.text(text[at:start])
        if start == end:
            self._rest = text[start:]
            return len(text)
        self._meet(text[start:end])
        return end

    def _meet(self, marker: str) -> None:
        """A marker was found in the text."""
        self._opening = [marker]
        self._phase = self._head

    def _head(self, text: str, at: int) -> int:
        """Where a call is expected."""
        char = text[at]
        if char == "{":
            self._begin()
            return at
        return self._skip(char, at) if char in SPACE else self._give_up(at)

    def _after(self, text: str, at: int) -> int:
        """After a call; what is skipped here is forgotten if the answer ends."""
        self._phase = self._text
        return at

    def _skip(self, char: str, at: int) -> int:
        self._opening.append(char)
        return at + 1

    def _give_up(self, at: int) -> int:
        """No call comes: what was skipped is text."""
        self._sink.text("".join(self._opening))
        self._opening.clear()
        self._phase = self._text
        return at

    def _begin(self) -> None:
        self._read(self.READER(self._sink, self._names, "".join(self._opening)))

    def _read(self, reader: Reader) -> None:
        self._opening.clear()
        self._reader = reader
        self._phase = self._call

    def _call(self, text: str, at: int) -> int:
        reader = self._reader
        assert reader is not None, "a call is being read"
        push = reader.push
        for here in range(at, len(text)):
            if not push(text[here]):
                self._broken(reader)
                return here
            if reader.closed:
                self._phase = self._after
                return here + 1
        return len(text)

    def _broken(self, reader: Reader) -> None:
        if not reader.started:
            self._sink.text(reader.raw)
            self._phase = self._text
        elif reader.whole:
            self._phase = self._after
        else:
            self._sink.arguments(reader.unsaid)
            self._phase = self._raw

    def _raw(self, text: str, at: int) -> int:
        start, end = self.RAW_MARKERS.find(text, at)
        self._sink.arguments(text[at:start])
        if start == end:
            self._rest = text[start:]
            return len(text)
        if not self._sink.has_arguments:
            self._sink.arguments("{}")
        self._phase = self._after
        return start


class ArrayParser(CallParser):
    """Calls in a JSON array, or one alone. Brackets and commas are no text once there is a call in them."""

    def __init__(self, tool_names: Collection[str]) -> None:
        super().__init__(tool_names)
        self._in_array = False

    def _head(self, text: str, at: int) -> int:
        if text[at] == "[" and not self._in_array:
            self._in_array = True
            return self._skip("[", at)
        return super()._head(text, at)

    def _after(self, text: str, at: int) -> int:
        char = text[at]
        if not self._in_array:
            return self._give_up(at)
        if char == "{":
            self._begin()
            return at
        if char == "]":
            self._in_array = False
            self._opening.clear()
            return at + 1
        return self._skip(char, at) if char == "," or char in SPACE else self._give_up(at)

    def _give_up(self, at: int) -> int:
        self._in_array = False
        return super()._give_up(at)
