"""One tool call read from its JSON object, `{"name": …, "arguments": {…}}`, while it is being written."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from typing import Final, Protocol

from text_generation_router.chat.parsers.scan import SPACE, ObjectScanner, escaped
from text_generation_router.chat.parsers.sink import Sink
from text_generation_router.chat.parsers.unwrap import Unwrapper

MAX_NAME: Final = 256
"""Characters of a tool's name, as written."""
MAX_HELD: Final = 1 << 18
"""Characters of a call read before its name is known; more, and it is text."""

_KEY_SEEN: Final = 16
"""Characters of a key that are looked at: more than any key that means something has."""


class Reader(Protocol):
    """Reads one call, a character at a time, and writes it to the sink."""

    @property
    def raw(self) -> str:
        """All that was read, as written, while the call is not `started`."""
        ...

    @property
    def unsaid(self) -> str:
        """The last of what was read of the arguments, as written, where it did not reach the sink."""
        ...

    started: bool
    """The sink knows of the call."""
    whole: bool
    """The sink has all of its arguments."""
    closed: bool
    """The call is over."""

    def push(self, char: str) -> bool:
        """Read one more character. False: it is not read, and no more can be."""
        ...


class CallReader:
    """Reads `{"name": …, "arguments" or "parameters": {…}}`, keys in any order, other keys skipped; the first of a kind counts.

    The name must be one of `names`. Arguments may be an object, a string that holds one, or null: `{}`.
    """

    def __init__(self, sink: Sink, names: Collection[str], opening: str) -> None:
        self.started = False
        self.whole = False
        self.closed = False
        self._sink = sink
        self._names = names
        self._raw = [opening]
        self._held: list[str] = []
        """Arguments that came before the name."""
        self._text: list[str] = []
        """The key or name being read."""
        self._unwrap: Unwrapper | None = None
        self._scanner = ObjectScanner()
        self._route: Callable[[str], bool] = self._members
        self._after_name: Callable[[str], bool] = self._members

    @property
    def raw(self) -> str:
        return "".join(self._raw)

    @property
    def unsaid(self) -> str:
        return self._unwrap.unsaid if self._unwrap else ""

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
        """Between members of the object, and inside of those that do not matter."""
        scanner = self._scanner
        if scanner.in_string and scanner.is_key and scanner.depth == 1:
            self._text.clear()
            self._route = self._key
        elif scanner.closed:
            if not self.started:
                return False
            if not self.whole:
                self._say("{}")
                self.whole = True
            self.closed = True
        return True

    def _key(self, char: str) -> bool:
        if not self._scanner.in_string:
            self._route = self._before_value
        elif len(self._text) < _KEY_SEEN:
            self._text.append(char)
        return True

    def _before_value(self, char: str) -> bool:
        if char == ":" or char in SPACE:
            return True
        return self._value("".join(self._text), char)

    def _value(self, key: str, char: str) -> bool:
        """A member's value begins with `char`."""
        self._route = self._members
        if key == "name" and not self.started:
            return self._open_name(char)
        if key in ("arguments", "parameters") and not self.whole:
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
        try:
            name = str(json.loads(f'"{"".join(self._text)}"'))
        except ValueError:  # bare control characters
            return False
        if name not in self._names:
            return False
        self._sink.start(name)
        self._sink.arguments("".join(self._held))
        self._raw.clear()
        self._held.clear()
        self.started = True
        self._route = self._after_name
        return True

    def _open_arguments(self, char: str) -> bool:
        if char == "{":
            self._say(char)
            self._route = self._object
        elif char == '"':
            self._unwrap = Unwrapper()
            self._route = self._wrapped
        # Null says as little as nothing.
        return char in '{"n'

    def _object(self, char: str) -> bool:
        self._say(escaped(char) if self._scanner.in_string else char)
        if self._scanner.depth == 1:
            self.whole = True
            self._route = self._members
        return True

    def _wrapped(self, char: str) -> bool:
        assert self._unwrap is not None, "a string of arguments was opened"
        if self._scanner.in_string:
            said = self._unwrap.push(char)
            self._say(said or "")
            return said is not None
        if not self._unwrap.may_end:
            return False
        self.whole = self._unwrap.whole
        self._unwrap = None
        self._route = self._members
        return True

    def _say(self, fragment: str) -> None:
        if self.started:
            self._sink.arguments(fragment)
        else:
            self._held.append(fragment)


class ArgumentsReader:
    """Reads the arguments of a call whose name is known: the bare object."""

    raw = ""
    unsaid = ""

    def __init__(self, sink: Sink) -> None:
        self.started = True
        self.whole = False
        self.closed = False
        self._sink = sink
        self._scanner = ObjectScanner()

    def push(self, char: str) -> bool:
        scanner = self._scanner
        if not scanner.push(char):
            return False
        if scanner.depth or scanner.closed:
            self._sink.arguments(escaped(char) if scanner.in_string else char)
        self.whole = self.closed = scanner.closed
        return True
