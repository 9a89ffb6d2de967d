"""JSON objects, checked and decoded one character at a time: RFC 8259 as a generator, constant work per character."""

import json
import re
from collections.abc import Callable, Generator
from typing import Final

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
