"""Readers of one tool call from its JSON object, `{"name": …, "arguments": {…}}`, one character at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from typing import ClassVar, Final, Protocol

from text_generation_router.chat.parsers.event_buffer import EventBuffer
from text_generation_router.chat.parsers.json_scanner import SPACE, ObjectScanner, escaped, unwrapped

MAX_NAME: Final = 256
"""Characters of a tool's name, as written."""
MAX_HELD: Final = 1 << 18
"""Characters of a call that are read before its name; a longer one is text."""


class CallReader(Protocol):
    """Reads one call, a character at a time, and writes its events to the buffer."""

    @property
    def raw(self) -> str:
        """Everything that was read, as written, while the call is not `started`."""
        ...

    @property
    def pending(self) -> str:
        """The end of the arguments, as written, that is not in the buffer."""
        ...

    started: bool
    """The buffer has the start of the call."""
    complete: bool
    """The buffer has all of its arguments."""
    closed: bool
    """The call has ended."""

    def push(self, char: str) -> bool:
        """Read the next character. False if it does not fit; then the reader must not be used again."""
        ...


class JsonCallReader:
    """Reads `{"name": …, "arguments" or "parameters": {…}}`: keys in any order, other keys skipped, the first of a kind counts.

    The name must be one of `names`. Arguments may be an object, a string that holds one, or null: `{}`.
    """

    NAME_KEY: ClassVar[str] = "name"

    def __init__(self, events: EventBuffer, names: Collection[str], opening: str) -> None:
        self.started = False
        self.complete = False
        self.closed = False
        self._events = events
        self._names = names
        self._raw = [opening]
        self._held: list[str] = []
        """Arguments before the name."""
        self._text: list[str] = []
        """The current key or name, or the string that holds the arguments."""
        self._scanner = ObjectScanner()
        self._route: Callable[[str], bool] = self._members

    @property
    def raw(self) -> str:
        return "".join(self._raw)

    @property
    def pending(self) -> str:
        return '"' + "".join(self._text) if self._route == self._wrapped else ""

    def push(self, char: str) -> bool:
        if not self.started:
            if len(self._raw) > MAX_HELD:
                return False
            if not (self._scanner.push(char) and self._route(char)):
                return False
            self._raw.append(char)
            return True
        return self._scanner.push(char) and self._route(char)

    def _members(self, char: str) -> bool:
        """Between members of the object, and in members that are skipped."""
        scanner = self._scanner
        if scanner.in_string and scanner.is_key and scanner.depth == 1:
            self._text.clear()
            self._route = self._key
        elif scanner.closed:
            if not self.started:
                return False
            if not self.complete:
                self._add_arguments("{}")
                self.complete = True
            self.closed = True
        return True

    def _key(self, char: str) -> bool:
        if not self._scanner.in_string:
            self._route = self._before_value
        elif len(self._text) <= MAX_NAME:
            self._text.append(char)
        return True

    def _before_value(self, char: str) -> bool:
        if char == ":" or char in SPACE:
            return True
        return self._value("".join(self._text), char)

    def _value(self, key: str, char: str) -> bool:
        """Read the first character of a member's value."""
        self._route = self._members
        if key == self.NAME_KEY and not self.started:
            return self._open_name(char)
        if key in ("arguments", "parameters") and not self.complete:
            return self._open_arguments(char)
        return True

    def _open_name(self, char: str) -> bool:
        self._text.clear()
        self._route = self._name
        return char == '"'

    def _name(self, char: str) -> bool:
        if self._scanner.in_string:
            self._text.append(char)
            return len(self._text) <= MAX_NAME
        self._route = self._members
        return self._start("".join(self._text))

    def _start(self, written: str) -> bool:
        """Start the call with this name, as it is written in JSON; False if it is not a tool's."""
        try:
            name = str(json.loads(f'"{written}"'))
        except ValueError:  # bare control characters
            return False
        if name not in self._names:
            return False
        self._events.start(name)
        self._events.arguments("".join(self._held))
        self._raw.clear()
        self._held.clear()
        self.started = True
        return True

    def _open_arguments(self, char: str) -> bool:
        if char == "{":
            self._add_arguments(char)
            self._route = self._object
        elif char == '"':
            self._text.clear()
            self._route = self._wrapped
        # null means no arguments.
        return char in '{"n'

    def _object(self, char: str) -> bool:
        self._add_arguments(escaped(char) if self._scanner.in_string else char)
        if self._scanner.depth == 1:
            self.complete = True
            self._route = self._members
        return True

    def _wrapped(self, char: str) -> bool:
        if self._scanner.in_string:
            self._text.append(char)
            return True
        if (arguments := unwrapped("".join(self._text))) is None:
            return False
        self._add_arguments(arguments)
        self.complete = bool(arguments)
        self._route = self._members
        return True

    def _add_arguments(self, fragment: str) -> None:
        if self.started:
            self._events.arguments(fragment)
        else:
            self._held.append(fragment)


class ArgumentsReader:
    """Reads the arguments of a call whose name is known: the object alone."""

    raw = ""
    pending = ""

    def __init__(self, events: EventBuffer) -> None:
        self.started = True
        self.complete = False
        self.closed = False
        self._events = events
        self._scanner = ObjectScanner()

    def push(self, char: str) -> bool:
        scanner = self._scanner
        if not scanner.push(char):
            return False
        if scanner.depth or scanner.closed:
            self._events.arguments(escaped(char) if scanner.in_string else char)
        self.complete = self.closed = scanner.closed
        return True
