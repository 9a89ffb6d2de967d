"""One tool call as TGI's grammar has it written: `{"function": {"_name": "<tool>", <arguments…>}}`."""

from __future__ import annotations

from collections.abc import Collection

from text_generation_router.chat.parsers.calls import CallReader
from text_generation_router.chat.parsers.scan import SPACE, escaped
from text_generation_router.chat.parsers.sink import Sink


class AnyCallReader(CallReader):
    """Reads TGI's form, or `{"name": …, "arguments": …}`: the first key tells them apart.

    The arguments are the members beside `_name`, each as written from the comma before it on, in one object.
    """

    def __init__(self, sink: Sink, names: Collection[str], opening: str) -> None:
        super().__init__(sink, names, opening)
        self._member: list[str] = []
        """A member so far, while it may be `_name`."""
        self._has_members = False

    def _value(self, key: str, char: str) -> bool:
        if key == "function" and char == "{" and not self.started and not self.whole:
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
            self._say(("," if self._has_members else "{") + "".join(self._member))
            self._has_members = True
            self._route = self._in_member
        self._member.clear()
        return True

    def _in_member(self, char: str) -> bool:
        if self._ends_member(char):
            return self._after_member(char)
        self._say(escaped(char) if self._scanner.in_string else char)
        return True

    def _before_member_name(self, char: str) -> bool:
        if char == ":" or char in SPACE:
            return True
        if self.started:
            self._route = self._after_member
            return True
        return self._open_name(char)

    def _after_member(self, char: str) -> bool:
        """After the name, and inside of a second one."""
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
        self._say("}" if self._has_members else "{}")
        self.whole = True
        self._route = self._members
        return True
