"""Readers of one tool call from its JSON object, `{"name": …, "arguments": {…}}`, one character at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from typing import ClassVar, Final, Protocol

from text_generation_router.chat.parsers.event_buffer import EventBuffer
from text_generation_router.chat.parsers.json_scanner import SPACE, ObjectScanner, StringUnwrapper, escaped

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
        """The current key or name."""
        self._unwrap: StringUnwrapper | None = None
        self._scanner = ObjectScanner()
        self._route: Callable[[str], bool] = self._members
        self._after_name: Callable[[str], bool] = self._members

    @property
    def raw(self) -> str:
        return "".join(self._raw)

    @property
    def pending(self) -> str:
        return self._unwrap.pending if self._unwrap else ""

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
        self._route = self._after_name
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
            self._unwrap = StringUnwrapper()
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
        assert self._unwrap is not None, "a string of arguments was opened"
        if self._scanner.in_string:
            added = self._unwrap.push(char)
            self._add_arguments(added or "")
            return added is not None
        if not self._unwrap.may_end:
            return False
        self.complete = self._unwrap.complete
        self._unwrap = None
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


class TgiCallReader(JsonCallReader):
    """Reads also the form of TGI's grammar, `{"function": {"_name": "<tool>", <arguments…>}}`.

    Its arguments are the members beside `_name`, each as written from the comma before it on, in one object.
    """

    def __init__(self, events: EventBuffer, names: Collection[str], opening: str) -> None:
        super().__init__(events, names, opening)
        self._member: list[str] = []
        """The current member, while it may be `_name`."""
        self._has_members = False

    def _value(self, key: str, char: str) -> bool:
        if key == "function" and char == "{" and not self.started and not self.complete:
            self._after_name = self._after_member
            self._route = self._before_member
            return True
        return super()._value(key, char)

    def _before_member(self, char: str) -> bool:
        if self._scanner.depth == 1:
            return self._close()
        self._member.append(char)
        if self._scanner.in_string:
            self._text.clear()
            self._route = self._member_key
        return True

    def _member_key(self, char: str) -> bool:
        self._member.append(escaped(char))
        if self._scanner.in_string:
            self._text.append(char)
            return True
        if "".join(self._text) == "_name":
            self._route = self._before_member_name
        else:
            self._add_arguments(("," if self._has_members else "{") + "".join(self._member))
            self._has_members = True
            self._route = self._in_member
        self._member.clear()
        return True

    def _in_member(self, char: str) -> bool:
        if self._ends_member(char):
            return self._after_member(char)
        self._add_arguments(escaped(char) if self._scanner.in_string else char)
        return True

    def _before_member_name(self, char: str) -> bool:
        if char == ":" or char in SPACE:
            return True
        if self.started:
            self._route = self._after_member
            return True
        return self._open_name(char)

    def _after_member(self, char: str) -> bool:
        """After the name, and in a second `_name`."""
        if not self._ends_member(char):
            return True
        self._route = self._before_member
        return self._scanner.depth == 2 or self._close()

    def _ends_member(self, char: str) -> bool:
        scanner = self._scanner
        return scanner.depth == 1 or (char == "," and scanner.depth == 2 and not scanner.in_string)

    def _close(self) -> bool:
        if not self.started:
            return False
        self._add_arguments("}" if self._has_members else "{}")
        self.complete = True
        self._route = self._members
        return True
