"""The base of the parsers of tool calls: text, markers and calls, and calls that break off."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Final

from text_generation_router.chat.events import Event, EventBuffer
from text_generation_router.chat.parsers.readers import MAX_NAME, SPACE, ArgumentsReader, CallReader, JsonCallReader
from text_generation_router.chat.parsers.syntax import CallSyntax

Tools = Mapping[str, Mapping[str, Any]]
"""The JSON schemas of the parameters of the tools, by name."""

_TOOL_NAME: Final = re.compile(r"[\w.:/-]{1,256}")


class AnyTools(dict[str, Mapping[str, Any]]):
    """Tools to which every name belongs; those that it does not list have no schema."""

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and _TOOL_NAME.fullmatch(name) is not None

    def __missing__(self, name: str) -> Mapping[str, Any]:
        return {}


class Markers:
    """Finds the first of several fixed texts in a stream, however it is cut."""

    def __init__(self, texts: Iterable[str]) -> None:
        texts = tuple(filter(None, texts))
        # An alternation of plain texts does not backtrack. Without texts it never matches.
        self._pattern = re.compile("|".join(map(re.escape, texts)) or "(?!)")
        self._prefixes = frozenset(text[:end] for text in texts for end in range(1, len(text)))
        self._longest = max(map(len, self._prefixes), default=0)

    def find(self, text: str, at: int, most: int | None = None) -> tuple[int, int]:
        """Return start and end of the first marker from `at` on.

        Without one, both are the position where a marker may have started, or the end of the text; if no marker starts in
        the first `most` characters, some position after them.
        """
        end = len(text) if most is None else min(len(text), at + most + self._longest + 1)
        found = self._pattern.search(text, at, end)
        if found is not None:
            return found.span()
        if end < len(text):
            return end, end
        for start in range(max(at, len(text) - self._longest), len(text)):
            if text[start:] in self._prefixes:
                return start, start
        return len(text), len(text)

    def at(self, text: str, at: int) -> int:
        """Return the end of the marker that starts at `at`; `at` if one may start there; -1 if none does."""
        found = self._pattern.match(text, at)
        if found is not None:
            return found.end()
        left = len(text) - at
        return at if left <= self._longest and (not left or text[at:] in self._prefixes) else -1


class CallParser:
    """Reads an answer in phases. A phase reads characters from `at` on and returns the position up to which it read.

    A call that breaks before its name is known is text, as written. One that breaks in its arguments keeps the rest, as
    written, up to the next marker. One that breaks after its arguments has ended.
    """

    MARKERS: ClassVar[Markers] = Markers(())
    """Markers in the text in front of calls, and after broken arguments."""
    ENDS: ClassVar[frozenset[str]] = frozenset()
    """Markers that end a call or a block of calls."""
    ENDS_OF_REASONING: ClassVar[tuple[str, ...]] = ()
    """Markers of calls that also end the reasoning before the answer."""
    SPECIAL: ClassVar[frozenset[str]] = frozenset()
    """Texts that may be special tokens of the model."""
    TAGS_OF_CALLS: ClassVar[frozenset[str]] = frozenset()
    """Texts that stand around calls and are not special tokens."""
    READER: ClassVar[type[JsonCallReader]] = JsonCallReader
    NAME_KEY: ClassVar = "name"
    """The key of the name of a call."""
    CALLS: ClassVar[Sequence[CallSyntax]]
    """The ways in which a grammar lets models write calls."""

    def __init_subclass__(cls, starts: tuple[str, ...] = (), ends: tuple[str, ...] = ()) -> None:
        """Set the markers of a format whose calls stand between `starts` and `ends`."""
        if starts:
            cls.MARKERS = Markers((*starts, *ends))
            cls.ENDS = frozenset(ends)
            own = frozenset(marker for marker in starts + ends if not marker.isalpha())
            cls.SPECIAL = cls.__dict__.get("SPECIAL", own)

    def __init__(self, tools: Tools) -> None:
        self.markers = self.SPECIAL
        self._tools = tools
        self._events = EventBuffer()
        self._content: Callable[[str], None] = self._events.text
        """Takes the text in front of a marker; may be empty."""
        self._rest = ""
        """The end of the last piece, which may be the start of a marker."""
        self._opening: list[str] = []
        """Characters between the marker and the call: text only if no call follows."""
        self._awaits_end = False
        """A call was read, its end marker was not."""
        self._reader: CallReader
        self._phase: Callable[[str, int], int] = self._text

    def feed(self, text: str) -> Sequence[Event]:
        if self._rest:
            text = self._rest + text
            self._rest = ""
        at, end = 0, len(text)
        while at < end:
            at = self._phase(text, at)
        return self._events.drain()

    def finish(self) -> Sequence[Event]:
        if self._phase == self._raw:
            self._events.arguments(self._rest)
        elif self._phase == self._call:
            self._end_reader()
        elif self._phase != self._after and not self._is_bare(self._rest):
            self._events.text("".join(self._opening) + self._rest)
        self._events.finish()
        return self._events.drain()

    def _text(self, text: str, at: int) -> int:
        start, end = self.MARKERS.find(text, at)
        self._content(text[at:start])
        if start == end:
            return self._hold(text, start)
        self._on_marker(text[start:end])
        return end

    def _is_bare(self, rest: str = "") -> bool:
        """Return True if nothing but special tokens and tags was read of a call, and `rest` may begin another one."""
        tags = self.SPECIAL | self.TAGS_OF_CALLS
        opening = "".join(self._opening)
        for tag in sorted(tags, key=len, reverse=True):
            opening = opening.replace(tag, "")
        is_bare = self._opening[:1] != [] and self._opening[0] in tags and not opening.strip()
        return is_bare and any(tag.startswith(rest.strip()) for tag in tags)

    def _on_marker(self, marker: str) -> None:
        if marker not in self.ENDS:
            self._opening = [marker]
            self._phase = self._head
        elif self._awaits_end:
            self._events.drop_blanks()
        else:  # without a call before it, it is text
            self._events.text(marker)
        self._awaits_end = False

    def _head(self, text: str, at: int) -> int:
        """Expect a call."""
        char = text[at]
        if char == "{":
            self._begin()
            return at
        return self._skip(char, at) if char in SPACE else self._no_call(text, at)

    def _no_call(self, text: str, at: int) -> int:
        """Drop an opening that a marker follows, and the end of its empty block; without a marker it is text."""
        end = self.MARKERS.at(text, at) if self._is_bare() else -1
        if end == at:
            return self._hold(text, at)
        if end < at:
            return self._not_a_call(at)
        self._opening.clear()
        self._phase = self._text
        return end if text[at:end] in self.ENDS else at

    def _after(self, text: str, at: int) -> int:
        """Read on after a call; characters skipped here are dropped if the answer ends."""
        self._phase = self._text
        return at

    def _hold(self, text: str, at: int) -> int:
        """Hold back the text from `at` on until more of it is known."""
        self._rest = text[at:]
        return len(text)

    def _skip(self, char: str, at: int) -> int:
        self._opening.append(char)
        return at + 1

    def _named(self, text: str, at: int) -> int:
        """Read a name up to the object of its arguments."""
        char = text[at]
        if char != "{":
            end = self.MARKERS.at(text, at)
            if end >= at:
                return self._hold(text, at) if end == at else self._no_call(text, at)
            self._skip(char, at)
            return at + 1 if len(self._opening) < 2 * MAX_NAME else self._not_a_call(at + 1)
        name = self._call_name("".join(self._opening))
        if name not in self._tools:
            return self._not_a_call(at)
        self._events.start(name)
        self._read(self._arguments_reader())
        return at

    def _call_name(self, opening: str) -> str:
        """Return the name of the call from the text between its marker, included, and its arguments."""
        return opening.strip()

    def _arguments_reader(self) -> CallReader:
        """Return the reader of the arguments of a call whose name was read."""
        return ArgumentsReader(self._events)

    def _not_a_call(self, at: int) -> int:
        """Treat the skipped characters as text: no call follows."""
        self._events.text("".join(self._opening))
        self._opening.clear()
        self._phase = self._text
        return at

    def _begin(self) -> None:
        self._read(self.READER(self._events, self._tools, "".join(self._opening), self.NAME_KEY))

    def _read(self, reader: CallReader) -> None:
        self._opening.clear()
        self._awaits_end = True
        self._reader = reader
        self._phase = self._call

    def _call(self, text: str, at: int) -> int:
        reader = self._reader
        push = reader.push
        for here in range(at, len(text)):
            try:
                push(text[here])
            except ValueError:
                self._end_reader()
                return here
            if reader.closed:
                self._phase = self._after
                return here + 1
        return len(text)

    def _end_reader(self) -> None:
        """End the reading of a call that breaks off."""
        if self._reader.started:
            self._events.arguments(self._reader.rest)
            self._phase = self._after if self._reader.complete else self._raw
        else:
            self._events.text(self._reader.rest)
            self._awaits_end = False
            self._phase = self._text

    def _raw(self, text: str, at: int) -> int:
        start, end = self.MARKERS.find(text, at)
        self._events.arguments(text[at:start])
        if start == end:
            return self._hold(text, start)
        if not self._events.has_arguments:
            self._events.arguments("{}")
        self._phase = self._after
        return start


class ArrayParser(CallParser):
    """Reads calls in a JSON array, or a single call. Brackets and commas around a call are not text."""

    def __init__(self, tools: Tools) -> None:
        super().__init__(tools)
        self._in_array = False

    def _head(self, text: str, at: int) -> int:
        if text[at] == "[" and not self._in_array:
            self._in_array = True
            return self._skip("[", at)
        return super()._head(text, at)

    def _after(self, text: str, at: int) -> int:
        char = text[at]
        if not self._in_array:
            return self._not_a_call(at)
        if char == "{":
            self._begin()
            return at
        if char == "]":
            self._in_array = False
            self._opening.clear()
            return at + 1
        return self._skip(char, at) if char == "," or char in SPACE else self._not_a_call(at)

    def _not_a_call(self, at: int) -> int:
        self._in_array = False
        return super()._not_a_call(at)
