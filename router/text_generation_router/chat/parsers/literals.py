"""Literals that are not JSON, checked and converted to JSON one character at a time: Python's, and those of Gemma 4.

Python      {'a': [1, None, True], "b": 'x'}, (1, 2), and the arguments of a call, a=1, b="x")
Gemma 4     {a:<|"|>text<|"|>,b:[1,null,true]}: names are bare, strings have a mark of their own and no escapes
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

import orjson

from text_generation_router.chat.parsers.event_buffer import EventBuffer
from text_generation_router.chat.parsers.json_scanner import MAX_DEPTH, SPACE

MAX_PYTHON: Final = 8192
"""Characters of a whole literal in Python, which is converted at once: ten milliseconds."""
MAX_WORD: Final = 1024
"""Characters of a number, a name or a text without quotes."""

_WORDS: Final = {"true": "true", "True": "true", "false": "false", "False": "false", "null": "null", "None": "null"}
_NUMBER: Final = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?")
_HEX: Final = frozenset("0123456789abcdefABCDEF")
_ESCAPES: Final = {
    "\n": "", "\\": "\\", "'": "'", '"': '"', "/": "/",
    "a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v",
}  # fmt: skip
_CODES: Final = {"x": 2, "u": 4, "U": 8}
"""Hexadecimal digits of an escape."""


@dataclass(frozen=True, slots=True)
class LiteralSyntax:
    """The differences between the literals of Python and of Gemma 4."""

    mark: str = ""
    """A mark of several characters around a string without escapes."""
    quotes: str = "'\""
    triple: bool = True
    """Three quotes may stand around a string; brackets may be those of a tuple."""
    bare: bool = False
    """Texts may stand without quotes."""


PYTHON: Final = LiteralSyntax()
GEMMA: Final = LiteralSyntax(mark='<|"|>', quotes='"', triple=False, bare=True)
FUNCTION_GEMMA: Final = replace(GEMMA, mark="<escape>")


class LiteralScanner:
    """Reads one list, tuple, dictionary or argument list, and writes it as JSON. Trailing commas pass."""

    def __init__(self, syntax: LiteralSyntax, write: Callable[[str], None]) -> None:
        self.closed = False
        """The literal is complete."""
        self._syntax = syntax
        self._write = write
        self._stack: list[tuple[str, str]] = []
        """The marks that end the open containers: here, and in JSON."""
        self._separator = ""
        """Written before the next key or value."""
        self._is_key = False
        self._unit = ""
        """The characters of the word, escape or mark that is being read."""
        self._partial = ""
        """The start of what may be the mark of the syntax."""
        self._quote = ""
        self._quotes = 0
        """Quotes in a row, in a string that ends with three."""
        self._state: Callable[[str], bool] = self._value
        self._after_escape: Callable[[str], bool] = self._value

    @property
    def pending(self) -> str:
        """The end of the literal, as it was read, that is not written."""
        return self._separator + self._unit + self._quote * self._quotes + self._partial

    def open_call(self) -> None:
        """Read the arguments of a Python call, up to its closing bracket, as one object."""
        self._open(")", "{", "}")

    def push(self, char: str) -> bool:
        """Read the next character. False if it does not fit; then the scanner must not be used again."""
        mark = self._syntax.mark
        if not mark or (char != mark[0] and not self._partial):
            return self._state(char)
        held = self._partial
        self._partial += char
        if self._partial == mark:
            self._partial = ""
            return self._state(mark)
        if mark.startswith(self._partial):
            return True
        for place, other in enumerate(held):
            self._partial = held[place:]
            if not self._state(other):
                return False
        self._partial = ""
        return self.push(char)

    def _open(self, close: str, json_open: str, json_close: str) -> bool:
        if len(self._stack) == MAX_DEPTH:
            return False
        self._put(json_open)
        self._stack.append((close, json_close))
        self._state = self._member
        return True

    def _put(self, text: str) -> None:
        self._write(self._separator + text)
        self._separator = ""

    def _member(self, char: str) -> bool:
        """Expect a key, an element or the end of the container."""
        if char in SPACE:
            return True
        if char == self._stack[-1][0]:
            return self._close()
        self._is_key = self._stack[-1][1] == "}"
        return self._value(char)

    def _close(self) -> bool:
        self._write(self._stack.pop()[1])
        self._separator = ""
        self._state = self._after
        self.closed = not self._stack
        return True

    def _value(self, char: str) -> bool:
        if char in SPACE:
            return True
        if not self._is_key:
            if char == "{":
                return self._open("}", "{", "}")
            if char == "[":
                return self._open("]", "[", "]")
            if char == "(" and self._syntax.triple:
                return self._open(")", "[", "]")
        if not self._stack:
            return False
        names_only = self._is_key and self._key_end == "="
        if char == self._syntax.mark or (char in self._syntax.quotes and not names_only):
            self._quote = char
            if self._syntax.triple:
                self._state = self._second_quote
            else:
                self._begin_string()
            return True
        if char in ",:=)]}" or (names_only and not (char.isalpha() or char == "_")):
            return False
        self._unit = char
        self._state = self._word
        return True

    def _word(self, char: str) -> bool:
        bare = self._syntax.bare
        if char in ((self._key_end,) if self._is_key else ",)]}") or (char in SPACE and not bare):
            return self._end_word() and self._state(char)
        if (self._is_key and char in ",]}") or (not bare and char in "([{'\""):
            return False
        self._unit += char
        return len(self._unit) <= MAX_WORD

    @property
    def _key_end(self) -> str:
        return "=" if self._stack[-1] == (")", "}") else ":"

    def _end_word(self) -> bool:
        word = self._unit.strip()
        if self._is_key:
            value: str | None = json.dumps(word, ensure_ascii=False)
        elif (value := _word_as_json(word)) is None and self._syntax.bare:
            value = json.dumps(word, ensure_ascii=False)
        if value is None:
            return False
        self._unit = ""
        self._put(value)
        self._ended()
        return True

    def _ended(self) -> None:
        """A key or a value has ended."""
        self._quote = ""
        self._state = self._colon if self._is_key else self._after

    def _colon(self, char: str) -> bool:
        if char in SPACE:
            return True
        if char != self._key_end:
            return False
        self._separator = ": "
        self._is_key = False
        self._state = self._first_of_value
        return True

    def _first_of_value(self, char: str) -> bool:
        if self._syntax.bare and char in ",}":
            self._put('""')
            self._state = self._after
            return self._after(char)
        return self._value(char)

    def _after(self, char: str) -> bool:
        if char in SPACE:
            return True
        if char == ",":
            self._separator = ", "
            self._state = self._member
            return True
        return char == self._stack[-1][0] and self._close()

    def _begin_string(self) -> None:
        self._put('"')
        self._state = self._string

    def _second_quote(self, char: str) -> bool:
        if char == self._quote:
            self._state = self._third_quote
            return True
        self._begin_string()
        return self._string(char)

    def _third_quote(self, char: str) -> bool:
        self._begin_string()
        if char == self._quote:
            self._state = self._long_string
            return True
        return self._end_string() and self._state(char)

    def _end_string(self) -> bool:
        self._write('"')
        self._ended()
        return True

    def _string(self, char: str) -> bool:
        if char == self._quote:
            return self._end_string()
        return self._in_string(char)

    def _long_string(self, char: str) -> bool:
        if char == self._quote:
            self._quotes += 1
            if self._quotes < 3:
                return True
            self._quotes = 0
            return self._end_string()
        if self._quotes:
            self._write(json_text(self._quote * self._quotes))
            self._quotes = 0
        return self._in_string(char)

    def _in_string(self, char: str) -> bool:
        if char == "\\" and self._quote != self._syntax.mark:
            self._unit = char
            self._after_escape = self._state
            self._state = self._escape
        else:
            self._write(json_text(char))
        return True

    def _escape(self, char: str) -> bool:
        if len(self._unit) == 1 and char not in _CODES:
            return self._unescaped(_ESCAPES.get(char, "\\" + char))
        self._unit += char
        digits = self._unit[2:]
        if not _HEX.issuperset(digits):
            self._unit = self._unit[:-1]
            return False
        if len(digits) < _CODES[self._unit[1]]:
            return True
        code = int(digits, 16)
        return code <= 0x10FFFF and self._unescaped(chr(code))

    def _unescaped(self, text: str) -> bool:
        self._unit = ""
        self._write(json_text(text))
        self._state = self._after_escape
        return True


class LiteralCallReader:
    """Reads the arguments of a call whose name is known."""

    raw = ""

    def __init__(self, events: EventBuffer, syntax: LiteralSyntax) -> None:
        self.started = True
        self.complete = False
        self.closed = False
        self._scanner = LiteralScanner(syntax, events.arguments)
        if syntax is PYTHON:
            self._scanner.open_call()

    @property
    def pending(self) -> str:
        return self._scanner.pending

    def push(self, char: str) -> bool:
        fits = self._scanner.push(char)
        self.complete = self.closed = self._scanner.closed
        return fits


def literal_as_json(text: str) -> str | None:
    """Return a list or an object, in JSON or short in Python, as JSON; None if it is neither."""
    try:
        value = json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError):
        if len(text) > MAX_PYTHON:
            return None
        written: list[str] = []
        scanner = LiteralScanner(PYTHON, written.append)
        fits = all(not scanner.closed and scanner.push(char) for char in text)
        return "".join(written) if fits and scanner.closed else None
    return text if isinstance(value, list | dict) else None


def json_text(text: str) -> str:
    """Return `text` as it stands in a JSON string. Half of a surrogate pair, which is not text, becomes an escape."""
    try:
        return orjson.dumps(text).decode()[1:-1]
    except orjson.JSONEncodeError:
        return "".join(json.dumps(char, ensure_ascii="\ud800" <= char <= "\udfff")[1:-1] for char in text)


def _word_as_json(word: str) -> str | None:
    """Return a number or a constant, in JSON or Python, as JSON."""
    if word in _WORDS:
        return _WORDS[word]
    if _NUMBER.fullmatch(word):
        return word
    for base in (0, 10) if len(word) <= 64 else ():
        with suppress(ValueError):
            return str(int(word, base))
    try:
        number = float(word)
    except ValueError:
        return None
    return repr(number) if math.isfinite(number) else None


def refuse(constant: str) -> None:
    """Raise ValueError for NaN and infinity, which are not JSON."""
    raise ValueError(constant)
