"""JSON objects, checked and decoded one character at a time: RFC 8259 as a state machine, constant work per character."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Final

MAX_DEPTH: Final = 64
SPACE: Final = frozenset(" \t\n\r")

_HEX: Final = frozenset("0123456789abcdefABCDEF")
_DIGITS: Final = frozenset("0123456789")
_CLOSERS: Final = {"{": "}", "[": "]"}
_LITERALS: Final = {"t": "rue", "f": "alse", "n": "ull"}
_CONTROLS: Final = {chr(code): f"\\u{code:04x}" for code in range(32)} | {"\n": "\\n", "\r": "\\r", "\t": "\\t"}

# Parts of a number: part → {next character: next part}. A number may end after the parts in _NUMBER_ENDS.
_NUMBER: Final[dict[str, dict[str, str]]] = {
    "minus": {"0": "zero"} | dict.fromkeys("123456789", "whole"),
    "zero": {".": "point", "e": "e", "E": "e"},
    "whole": dict.fromkeys("0123456789", "whole") | {".": "point", "e": "e", "E": "e"},
    "point": dict.fromkeys("0123456789", "fraction"),
    "fraction": dict.fromkeys("0123456789", "fraction") | {"e": "e", "E": "e"},
    "e": dict.fromkeys("0123456789", "exponent") | {"+": "sign", "-": "sign"},
    "sign": dict.fromkeys("0123456789", "exponent"),
    "exponent": dict.fromkeys("0123456789", "exponent"),
}
_NUMBER_ENDS: Final = frozenset({"zero", "whole", "fraction", "exponent"})


def escaped(char: str) -> str:
    """Return a character of a JSON string as JSON requires it: models write newlines in code without an escape."""
    return _CONTROLS.get(char, char)


class ObjectScanner:
    """Checks, character by character, that a text is one JSON object.

    Control characters in strings pass (see `escaped`); nesting deeper than `MAX_DEPTH` does not.
    """

    __slots__ = ("_awaited", "_left", "_part", "_rest", "_state", "closed", "depth", "in_string", "is_key")

    def __init__(self) -> None:
        self.depth = 0
        self.closed = False
        """The object is complete; only whitespace may follow."""
        self.in_string = False
        """The last character opened or continued a string."""
        self.is_key = False
        """The last string is a key."""
        self._awaited: list[str] = []
        self._left = 0
        self._part = ""
        self._rest = ""
        self._state: Callable[[str], bool] = self._root

    def push(self, char: str) -> bool:
        """Read the next character. False if it does not fit; then the scanner must not be used again."""
        return self._state(char)

    def _root(self, char: str) -> bool:
        return char in SPACE or (char == "{" and self._open(char))

    def _open(self, char: str) -> bool:
        if self.depth == MAX_DEPTH:
            return False
        self._awaited.append(_CLOSERS[char])
        self.depth += 1
        self._state = self._first_key if char == "{" else self._first_value
        return True

    def _close(self) -> bool:
        self._awaited.pop()
        self.depth -= 1
        self.closed = self.depth == 0
        self._state = self._over if self.closed else self._after
        return True

    def _over(self, char: str) -> bool:
        return char in SPACE

    def _first_key(self, char: str) -> bool:
        return self._close() if char == "}" else self._key(char)

    def _key(self, char: str) -> bool:
        if char == '"':
            self.in_string = self.is_key = True
            self._state = self._string
            return True
        return char in SPACE

    def _colon(self, char: str) -> bool:
        if char == ":":
            self._state = self._value
            return True
        return char in SPACE

    def _first_value(self, char: str) -> bool:
        if char in SPACE:
            return True
        return self._close() if char == "]" else self._value(char)

    def _value(self, char: str) -> bool:
        if char in SPACE:
            return True
        if char == '"':
            self.in_string, self.is_key = True, False
            self._state = self._string
        elif char in _CLOSERS:
            return self._open(char)
        elif char in _LITERALS:
            self._rest = _LITERALS[char]
            self._state = self._literal
        elif char == "-" or char in _DIGITS:
            self._part = "minus" if char == "-" else "zero" if char == "0" else "whole"
            self._state = self._number
        else:
            return False
        return True

    def _string(self, char: str) -> bool:
        if char == '"':
            self.in_string = False
            self._state = self._colon if self.is_key else self._after
        elif char == "\\":
            self._state = self._escape
        return True

    def _escape(self, char: str) -> bool:
        if char == "u":
            self._left = 4
            self._state = self._hex
            return True
        self._state = self._string
        return char in '"\\/bfnrt'

    def _hex(self, char: str) -> bool:
        self._left -= 1
        if self._left == 0:
            self._state = self._string
        return char in _HEX

    def _literal(self, char: str) -> bool:
        if self._rest[0] != char:
            return False
        self._rest = self._rest[1:]
        if not self._rest:
            self._state = self._after
        return True

    def _number(self, char: str) -> bool:
        part = _NUMBER[self._part].get(char)
        if part is not None:
            self._part = part
            return True
        # A number ends only where something else begins.
        self._state = self._after
        return self._part in _NUMBER_ENDS and self._after(char)

    def _after(self, char: str) -> bool:
        awaited = self._awaited[-1]
        if char == ",":
            self._state = self._key if awaited == "}" else self._value
            return True
        if char == awaited:
            return self._close()
        return char in SPACE


def unwrapped(written: str) -> str | None:
    """Return the JSON object whose text a JSON string holds, by the characters between its quotes.

    The result is empty for a blank string, and None for any other string.
    """
    try:
        inner = str(json.loads(f'"{written}"', strict=False)).strip(" \t\n\r")
    except ValueError:
        return None
    scanner, parts = ObjectScanner(), list[str]()
    for char in inner:
        if not scanner.push(char):
            return None
        # Half of a surrogate pair is not text; as an escape it has the same meaning.
        half = "\ud800" <= char <= "\udfff"
        parts.append(json.dumps(char)[1:-1] if half else escaped(char) if scanner.in_string else char)
    return "".join(parts) if scanner.closed or not inner else None
