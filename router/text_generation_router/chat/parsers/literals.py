"""Literals that are not JSON, checked and converted to JSON one character at a time: Python's, and those of Gemma 4.

Python      {'a': [1, None, True], "b": 'x'}, (1, 2), and the arguments of a call, a=1, b="x")
Gemma 4     {a:<|"|>text<|"|>,b:[1,null,true]}: names are bare, strings have a mark of their own and no escapes
"""

import json
import math
import re
import sys
from collections.abc import Callable, Generator
from contextlib import suppress
from typing import Final

import orjson

from text_generation_router.chat.events import EventBuffer
from text_generation_router.chat.parsers.readers import HEX, MAX_DEPTH, SPACE, CallReader, next_visible

MAX_PYTHON: Final = 8192
"""Characters of a whole literal in Python, which is converted at once: ten milliseconds."""
MAX_WORD: Final = 1024
"""Characters of a number, a name or a text without quotes."""

_WORDS: Final = {"true": "true", "True": "true", "false": "false", "False": "false", "null": "null", "None": "null"}
_NUMBER: Final = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?")
_BRACKETS: Final = {"{": ("}", "{", "}"), "[": ("]", "[", "]"), "(": (")", "[", "]")}
"""Brackets that open containers, each with the one that closes it, and those of JSON."""
_ESCAPES: Final = {
    "\n": "", "\\": "\\", "'": "'", '"': '"', "/": "/",
    "a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v",
}  # fmt: skip
_CODES: Final = {"x": 2, "u": 4, "U": 8}
"""Hexadecimal digits of an escape."""


class LiteralScanner:
    """Reads one list, tuple, dictionary or argument list, and writes it as JSON. Trailing commas pass."""

    def __init__(self, write: Callable[[str], None], mark: str = "") -> None:
        """`mark` stands around strings in the literals of Gemma; those of Python have none."""
        self.closed = False
        """The literal is complete."""
        self._mark = mark
        self._write = write
        self._stack: list[tuple[str, str]] = []
        """The marks that end the open containers: here, and in JSON."""
        self._separator = ""
        """Written before the next key or value."""
        self._unit = ""
        """The characters of the word, escape or run of quotes that is being read."""
        self._partial = ""
        """The start of what may be the mark."""
        reading = self._literal()
        next(reading)
        self._read = reading.send

    @property
    def rest(self) -> str:
        """The end of the literal, as it was read, that is not written."""
        return self._separator + self._unit + self._partial

    def open_call(self) -> None:
        """Read the arguments of a Python call, up to its closing bracket, as one object."""
        self._open(")", "{", "}")

    def push(self, char: str) -> None:
        """Read the next character. Raises ValueError if it does not fit; then the scanner must not be used again."""
        mark = self._mark
        if not mark or (char != mark[0] and not self._partial):
            self._read(char)
            return
        held = self._partial
        self._partial += char
        if self._partial == mark:
            self._partial = ""
            self._read(mark)
        elif not mark.startswith(self._partial):
            for place, other in enumerate(held):
                self._partial = held[place:]
                self._read(other)
            self._partial = ""
            self.push(char)

    def _open(self, close: str, json_open: str, json_close: str) -> None:
        if len(self._stack) == MAX_DEPTH:
            raise ValueError(json_open)
        self._put(json_open)
        self._stack.append((close, json_close))

    def _put(self, text: str) -> None:
        self._write(self._separator + text)
        self._separator = ""

    def _literal(self) -> Generator[None, str, None]:
        """Read the literal. Like the others, it is sent the characters, and the mark as one."""
        char = yield from next_visible()
        while True:
            close, json_close = self._stack[-1] if self._stack else ("", "")
            if char == close:
                self._separator = ""
                self._write(json_close)
                self._stack.pop()
                self.closed = not self._stack
                char = yield from next_visible()
            else:
                in_object = json_close == "}"
                if in_object:
                    char = yield from self._key(char, "=" if close == ")" else ":")
                if char in _BRACKETS and not (char == "(" and self._mark):
                    self._open(*_BRACKETS[char])
                    char = yield from next_visible()
                    continue
                if not self._stack:
                    raise ValueError(char)
                if in_object and self._mark and char in ",}":
                    self._put('""')
                elif self._is_quote(char):
                    char = yield from self._string(char)
                else:
                    char = yield from self._word(char, ",)]}")
                if char in SPACE:
                    char = yield from next_visible()
            if char == ",":
                self._separator = ", "
                char = yield from next_visible()
            elif char != self._stack[-1][0]:
                raise ValueError(char)

    def _key(self, char: str, end: str) -> Generator[None, str, str]:
        """Read a key and `end`; return the first character of its value. An argument's name has no quotes."""
        if self._is_quote(char) and end == ":":
            char = yield from self._string(char)
        else:
            if end == "=" and not (char.isalpha() or char == "_"):
                raise ValueError(char)
            char = yield from self._word(char, end, is_key=True)
        if char in SPACE:
            char = yield from next_visible()
        if char != end:
            raise ValueError(char)
        self._separator = ": "
        return (yield from next_visible())

    def _is_quote(self, char: str) -> bool:
        return char in (self._mark, '"') if self._mark else char in "'\""

    def _word(self, char: str, ends: str, *, is_key: bool = False) -> Generator[None, str, str]:
        """Read a key or value without quotes; return the character after it."""
        bare = bool(self._mark)
        if char in ",:=)]}":
            raise ValueError(char)
        refused = ",]}" * is_key + "([{'\"" * (not bare)
        while char not in ends and (bare or char not in SPACE):
            if (self._unit and char in refused) or len(self._unit) >= MAX_WORD:
                raise ValueError(char)
            self._unit += char
            char = yield
        word = self._unit.strip()
        value = None if is_key else _word_as_json(word)
        if value is None:
            if not is_key and not bare:
                raise ValueError(word)
            value = json.dumps(word, ensure_ascii=False)
        self._unit = ""
        self._put(value)
        return char

    def _string(self, quote: str) -> Generator[None, str, str]:
        """Read a string after its first quote; return the character after it."""
        self._put('"')
        char = yield
        closing = quote
        if char == quote and not self._mark:
            char = yield
            if char != quote:
                self._write('"')
                return char
            closing *= 3
            char = yield
        while True:
            if char == quote:
                self._unit += quote
                if self._unit == closing:
                    break
            else:
                if self._unit:
                    self._write(json_text(self._unit))
                    self._unit = ""
                is_escape = char == "\\" and quote != self._mark
                self._write(json_text((yield from self._escape()) if is_escape else char))
            char = yield
        self._unit = ""
        self._write('"')
        return (yield)

    def _escape(self) -> Generator[None, str, str]:
        self._unit = "\\"
        char = yield
        text = _ESCAPES.get(char, "\\" + char)
        if char in _CODES:
            self._unit += char
            for _ in range(_CODES[char]):
                digit = yield
                if digit not in HEX or int(self._unit[2:] + digit, 16) > sys.maxunicode:
                    raise ValueError(digit)
                self._unit += digit
            text = chr(int(self._unit[2:], 16))
        self._unit = ""
        return text


class LiteralCallReader(CallReader):
    """Reads the arguments of a call whose name is known; `mark`: see LiteralScanner."""

    def __init__(self, events: EventBuffer, mark: str = "") -> None:
        super().__init__(events)
        self._scanner = LiteralScanner(events.arguments, mark)
        if not mark:
            self._scanner.open_call()

    @property
    def rest(self) -> str:
        return self._scanner.rest

    def push(self, char: str) -> None:
        self._scanner.push(char)
        self.complete = self.closed = self._scanner.closed


def literal_as_json(text: str) -> str | None:
    """Return a list or an object, in JSON or short in Python, as JSON; None if it is neither."""
    try:
        value = json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError):
        if len(text) > MAX_PYTHON:
            return None
        written: list[str] = []
        scanner = LiteralScanner(written.append)
        with suppress(ValueError):
            for char in text[:-1]:
                scanner.push(char)
                if scanner.closed:
                    return None
            scanner.push(text[-1])
        return "".join(written) if scanner.closed else None
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
