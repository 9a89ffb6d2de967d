"""Readers of one tool call, `{"name": …, "arguments": {…}}` or its arguments alone, one character at a time.

The JSON is checked and decoded by RFC 8259, as a generator, with constant work per character.
"""

import json
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator
from typing import Final

from text_generation_router.chat.events import EventBuffer

MAX_DEPTH: Final = 64
SPACE: Final = frozenset(" \t\n\r")
HEX: Final = frozenset("0123456789abcdefABCDEF")
NUMBER: Final = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")

_CLOSERS: Final = {"{": "}", "[": "]"}
_LITERALS: Final = {"t": "rue", "f": "alse", "n": "ull"}
_OF_NUMBERS: Final = frozenset("0123456789+-.eE")
_CONTROLS: Final = {chr(code): f"\\u{code:04x}" for code in range(32)} | {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def escaped(char: str) -> str:
    """Return a character of a JSON string as JSON requires it: models write newlines in code without an escape."""
    return _CONTROLS.get(char, char)


def next_visible() -> Generator[None, str, str]:
    """Accept the last character; return the next one that is not whitespace."""
    while (char := (yield)) in SPACE:
        pass
    return char


class ObjectScanner:
    """Checks, character by character, that a text is one JSON object.

    Control characters in strings pass (see `escaped`); nesting deeper than `MAX_DEPTH` does not.
    """

    __slots__ = ("closed", "depth", "in_string", "is_key", "push")

    def __init__(self) -> None:
        self.depth = 0
        self.closed = False
        """The object is complete; only whitespace may follow."""
        self.in_string = False
        """The last character opened or continued a string."""
        self.is_key = False
        """The last string is a key."""
        reading = self._object()
        next(reading)
        self.push: Callable[[str], None] = reading.send
        """Reads the next character. Raises ValueError if it does not fit; then the scanner must not be used again."""

    def _object(self) -> Generator[None, str, None]:
        """Read the object. Like the others, it is sent the characters."""
        closers: list[str] = []
        char = yield from next_visible()
        if char != "{":
            raise ValueError(char)
        while True:
            if char in _CLOSERS and self.depth < MAX_DEPTH:
                closers.append(_CLOSERS[char])
                self.depth += 1
                char = yield from next_visible()
                if char != closers[-1]:
                    char = yield from self._key(char, closers[-1])
                    continue
            elif char == '"':
                self.is_key = False
                char = yield from self._string()
            else:
                char = yield from self._word(char)
            while closers and char == closers[-1]:
                closers.pop()
                self.depth -= 1
                self.closed = not closers
                char = yield from next_visible()
            if char != "," or self.closed:
                raise ValueError(char)
            char = yield from next_visible()
            char = yield from self._key(char, closers[-1])

    def _key(self, char: str, closer: str) -> Generator[None, str, str]:
        """Read the key that begins with `char`, if an object is open; return the first character of the value."""
        if closer == "]":
            return char
        if char != '"':
            raise ValueError(char)
        self.is_key = True
        if (char := (yield from self._string())) != ":":
            raise ValueError(char)
        return (yield from next_visible())

    def _string(self) -> Generator[None, str, str]:
        """Read a string after its quote; return the first character after it that is not whitespace."""
        self.in_string = True
        while (char := (yield)) != '"':
            if char != "\\":
                continue
            if (char := (yield)) == "u":
                for _ in range(4):
                    if (yield) not in HEX:
                        raise ValueError
            elif char not in '"\\/bfnrt':
                raise ValueError(char)
        self.in_string = False
        return (yield from next_visible())

    def _word(self, char: str) -> Generator[None, str, str]:
        """Read a number or literal that begins with `char`; return the first character after it that is not whitespace."""
        if char in _LITERALS:
            for expected in _LITERALS[char]:
                if (yield) != expected:
                    raise ValueError
            return (yield from next_visible())
        number = ""
        while char in _OF_NUMBERS:
            number += char
            char = yield
        if not NUMBER.fullmatch(number):
            raise ValueError(number)
        return (yield from next_visible()) if char in SPACE else char


def unwrapped(written: str) -> str:
    """Return the JSON object whose text a JSON string holds, by the characters between its quotes; empty if they are blank.

    Raises ValueError for any other string.
    """
    inner = str(json.loads(f'"{written}"', strict=False)).strip(" \t\n\r")
    scanner, parts = ObjectScanner(), list[str]()
    for char in inner:
        scanner.push(char)
        # Half of a surrogate pair is not text; as an escape it has the same meaning.
        half = "\ud800" <= char <= "\udfff"
        parts.append(json.dumps(char)[1:-1] if half else escaped(char) if scanner.in_string else char)
    if inner and not scanner.closed:
        raise ValueError(inner)
    return "".join(parts)


MAX_NAME: Final = 256
"""Characters of a tool's name, as written."""
MAX_HELD: Final = 1 << 18
"""Characters of a call that are read before its name; a longer one is text."""


class CallReader(ABC):
    """Reads one call, a character at a time, and writes its events to the buffer."""

    def __init__(self, events: EventBuffer, *, started: bool = True) -> None:
        self.started = started
        """The buffer has the start of the call."""
        self.complete = False
        """The buffer has all of its arguments."""
        self.closed = False
        """The call has ended."""
        self._events = events

    @property
    def rest(self) -> str:
        """Everything that was read, as written, while the call is not `started`; then the arguments that are not in the buffer."""
        return ""

    @abstractmethod
    def push(self, char: str) -> None:
        """Read the next character. Raises ValueError if it does not fit; then the reader must not be used again."""


class JsonCallReader(CallReader):
    """Reads `{"name": …, "arguments" or "parameters": {…}}`: keys in any order, other keys skipped, the first of a kind counts.

    The name must be one of `names`. Arguments may be an object, a string that holds one, or null: `{}`.
    """

    def __init__(self, events: EventBuffer, names: Collection[str], opening: str, name_key: str) -> None:
        super().__init__(events, started=False)
        self._name_key = name_key
        self._names = names
        self._raw = [opening]
        self._held: list[str] = []
        """Arguments before the name."""
        self._wrapped: list[str] = []
        """The string that holds the arguments, as far as it was read."""
        self._scanner = ObjectScanner()
        reading = self._members()
        next(reading)
        self._read = reading.send

    @property
    def rest(self) -> str:
        return "".join(self._wrapped if self.started else self._raw)

    def push(self, char: str) -> None:
        if not self.started and len(self._raw) > MAX_HELD:
            raise ValueError(char)
        self._scanner.push(char)
        self._read(char)
        if not self.started:
            self._raw.append(char)

    def _members(self) -> Generator[None, str, None]:
        """Read the members of the object. Like the others, it is sent the characters that fit the JSON."""
        scanner = self._scanner
        while not scanner.closed:
            yield
            if scanner.in_string and scanner.is_key and scanner.depth == 1:
                key = yield from self._string([])
                while (char := (yield)) == ":" or char in SPACE:
                    pass
                yield from self._member(key, char)
        if not self.started:
            raise ValueError
        if not self.complete:
            self._events.arguments("{}")
            self.complete = True
        self.closed = True
        yield

    def _member(self, key: str, char: str) -> Generator[None, str, None] | tuple[()]:
        """Return the reader of the member whose value begins with `char`; empty for one that is skipped."""
        if key == self._name_key and not self.started:
            return self._name(char)
        if key in ("arguments", "parameters") and not self.complete:
            return self._arguments(char)
        return ()

    def _name(self, char: str) -> Generator[None, str, None]:
        if char != '"':
            raise ValueError(char)
        self._start((yield from self._string([], MAX_NAME)))

    def _string(self, parts: list[str], most: int = sys.maxsize) -> Generator[None, str, str]:
        """Read a string after its quote into `parts`, up to its closing quote; return it as written."""
        while True:
            char = yield
            if not self._scanner.in_string:
                return "".join(parts)
            if len(parts) == most:
                raise ValueError(char)
            parts.append(char)

    def _start(self, written: str) -> None:
        """Start the call with this name, as it is written in JSON. Raises ValueError if it is not a tool's."""
        name = str(json.loads(f'"{written}"'))
        if name not in self._names:
            raise ValueError(name)
        self._events.start(name)
        self._events.arguments("".join(self._held))
        self._raw.clear()
        self._held.clear()
        self.started = True

    def _arguments(self, char: str) -> Generator[None, str, None]:
        add = self._events.arguments if self.started else self._held.append
        if char == "{":
            add(char)
            while self._scanner.depth > 1:
                char = yield
                add(escaped(char) if self._scanner.in_string else char)
            self.complete = True
        elif char == '"':
            self._wrapped.append(char)
            arguments = unwrapped((yield from self._string(self._wrapped))[1:])
            self._wrapped.clear()
            add(arguments)
            self.complete = bool(arguments)
        elif char != "n":  # null means no arguments
            raise ValueError(char)


class ArgumentsReader(CallReader):
    """Reads the arguments of a call whose name is known: the object alone."""

    def __init__(self, events: EventBuffer) -> None:
        super().__init__(events)
        self._scanner = ObjectScanner()

    def push(self, char: str) -> None:
        scanner = self._scanner
        scanner.push(char)
        if scanner.depth or scanner.closed:
            self._events.arguments(escaped(char) if scanner.in_string else char)
        self.complete = self.closed = scanner.closed
