"""Tool calls as Python calls: `[f(a=1, b="x"), g()]` of Llama 4, Llama 3.2 and LFM2, and one a line of OLMo 3."""

from collections.abc import Sequence
from typing import Final

from text_generation_router.chat.events import Event
from text_generation_router.chat.parsers.base import Tools
from text_generation_router.chat.parsers.formats import Llama3JsonParser
from text_generation_router.chat.parsers.literals import LiteralCallReader
from text_generation_router.chat.parsers.readers import MAX_NAME, SPACE
from text_generation_router.chat.parsers.syntax import CallSyntax, Slot

PYTHON_START: Final = "<|python_start|>"
PYTHON_END: Final = "<|python_end|>"
LFM_START: Final = "<|tool_call_start|>"
LFM_END: Final = "<|tool_call_end|>"
OLMO_START: Final = "<function_calls>"
OLMO_END: Final = "</function_calls>"

_CALL: Final = (Slot.NAME, "(", Slot.PYTHON_ARGUMENTS, ")")


class PythonicParser(Llama3JsonParser, starts=(PYTHON_START,), ends=(PYTHON_END,)):
    """Calls at the start of the answer, or between `<|python_start|>` and `<|python_end|>`: a list of Python calls, or JSON
    objects, as the templates of Llama 4 ask for."""

    CALLS = tuple(
        CallSyntax(_CALL, (start, "["), (", ",), ("]", end)) for start, end in (("", ""), (PYTHON_START, PYTHON_END))
    )

    def __init__(self, tools: Tools) -> None:
        super().__init__(tools)
        self._in_list = False
        self._name = ""

    def finish(self) -> Sequence[Event]:
        if self._phase == self._python_name and not self._name and self._events.calls:
            self._phase = self._after
        return super().finish()

    def _head(self, text: str, at: int) -> int:
        if text[at] != "[":
            return super()._head(text, at)
        self._in_list = True
        self._phase = self._python_name
        self._name = ""
        return self._skip("[", at)

    def _python_name(self, text: str, at: int) -> int:
        """Read a name up to its bracket."""
        char = text[at]
        if char == "(" and self._name in self._tools:
            self._events.start(self._name)
            self._read(LiteralCallReader(self._events))
            return at + 1
        if char in SPACE and not self._name:
            return self._skip(char, at)
        if not (char.isalnum() or char in "_.-") or len(self._name) == MAX_NAME:
            return self._not_a_call(at)
        self._name += char
        return self._skip(char, at)

    def _after(self, text: str, at: int) -> int:
        if not self._in_list:
            return super()._after(text, at)
        char = text[at]
        if char == "]":
            self._opening.clear()
            self._in_list = False
            self._phase = self._text
            return at + 1
        if char == ",":
            self._phase = self._python_name
            self._name = ""
        return self._skip(char, at) if char == "," or char in SPACE else self._not_a_call(at)

    def _not_a_call(self, at: int) -> int:
        self._in_list = False
        return super()._not_a_call(at)


class Lfm2Parser(PythonicParser, starts=(LFM_START,), ends=(LFM_END,)):
    """LFM2 and later: calls only between its tokens."""

    CALLS = (CallSyntax(_CALL, (f"{LFM_START}[",), (", ",), (f"]{LFM_END}",)),)

    def __init__(self, tools: Tools) -> None:
        super().__init__(tools)
        self._phase = self._text


class Olmo3Parser(Lfm2Parser, starts=(OLMO_START,), ends=(OLMO_END,)):
    """OLMo 3: calls without brackets, on lines of their own."""

    CALLS = (CallSyntax(_CALL, (OLMO_START, Slot.GAP), ("\n",), (Slot.GAP, OLMO_END)),)

    def _head(self, text: str, at: int) -> int:
        char = text[at]
        if not (char.isalpha() or char == "_"):
            return self._skip(char, at) if char in SPACE else self._no_call(text, at)
        self._name = ""
        self._phase = self._python_name
        return at

    def _after(self, text: str, at: int) -> int:
        return self._head(text, at)
