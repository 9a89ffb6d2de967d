"""The formats in which models write tool calls: one parser for each."""

from collections.abc import Sequence
from typing import Final

from text_generation_router.chat.events import Event, TextDelta
from text_generation_router.chat.parsers.base import ArrayParser, CallParser, Tools
from text_generation_router.chat.parsers.json_scanner import SPACE
from text_generation_router.chat.parsers.readers import MAX_NAME, ArgumentsReader
from text_generation_router.chat.parsers.syntax import CallSyntax, JsonCall, Pattern, Slot

HERMES_START: Final = "<tool_call>"
HERMES_END: Final = "</tool_call>"
LLAMA_TAG: Final = "<|python_tag|>"
MISTRAL_CALLS: Final = "[TOOL_CALLS]"
MISTRAL_CALL_ID: Final = "[CALL_ID]"
MISTRAL_ARGS: Final = "[ARGS]"
FENCE: Final = "```"
_OPENINGS: Final = ("", FENCE, f"{FENCE}json")


class HermesParser(CallParser, starts=(HERMES_START,), ends=(HERMES_END,)):
    """Hermes and Qwen: `<tool_call>\\n{"name": …, "arguments": {…}}\\n</tool_call>`, anywhere in the text, any number of times.

    The end tag may be missing; without a call before it, it is text. Characters between a call and its end tag are text.
    """

    ENDS_OF_REASONING = (HERMES_START,)
    CALLS = (CallSyntax((HERMES_START, Slot.GAP, JsonCall(), Slot.GAP, HERMES_END), blocks=True),)


class Llama3JsonParser(CallParser, starts=(LLAMA_TAG,)):
    """Llama 3: `{"name": …, "parameters": {…}}` at the start of the answer or after `<|python_tag|>`.

    Several calls are separated by `;` or by whitespace alone.
    """

    CALLS = tuple(CallSyntax((JsonCall("parameters"),), before, between=("; ",)) for before in ((), (LLAMA_TAG,)))

    def __init__(self, tools: Tools) -> None:
        super().__init__(tools)
        self._phase = self._head

    def _after(self, text: str, at: int) -> int:
        char = text[at]
        if char == ";" and char not in self._opening:
            return self._skip(char, at)
        return self._head(text, at)


class MistralParser(ArrayParser, starts=(MISTRAL_CALLS,)):
    """Mistral: `[TOOL_CALLS]` and an array of calls, or, newer, `[TOOL_CALLS]name[ARGS]{…}` for each call.

    The newer form may have `[CALL_ID]` and an id after the name, which are skipped, and may lack `[ARGS]`.
    """

    SPECIAL = frozenset({MISTRAL_CALLS, MISTRAL_CALL_ID, MISTRAL_ARGS})
    CALLS = (
        *(
            CallSyntax((JsonCall(),), before=(MISTRAL_CALLS, opening), between=(", ",), after=("]",))
            for opening in ("[", " [")
        ),
        *(
            CallSyntax((MISTRAL_CALLS, Slot.NAME, *head, Slot.ARGUMENTS), blocks=True)
            for head in ((), (MISTRAL_ARGS,), (MISTRAL_CALL_ID, Pattern("[a-zA-Z0-9]{1,32}"), MISTRAL_ARGS))
        ),
    )

    def _head(self, text: str, at: int) -> int:
        if self._in_array or text[at] in SPACE or text[at] in "[{":
            return super()._head(text, at)
        self._phase = self._named
        return at

    def _named(self, text: str, at: int) -> int:
        """Read from the name to the arguments."""
        char = text[at]
        is_object = char == "{"
        if not is_object:
            self._skip(char, at)
            if len(self._opening) > MAX_NAME + len(MISTRAL_CALL_ID + MISTRAL_ARGS):
                return self._not_a_call(at + 1)
            if char != "]":
                return at + 1
        head = "".join(self._opening).removeprefix(MISTRAL_CALLS)
        if not is_object and not head.endswith(MISTRAL_ARGS):
            return at + 1
        name = head.removesuffix(MISTRAL_ARGS).partition(MISTRAL_CALL_ID)[0].strip()
        if name not in self._tools:
            return self._not_a_call(at + (not is_object))
        self._events.start(name)
        self._read(ArgumentsReader(self._events))
        return at + (not is_object)


class JsonAnswerParser(CallParser):
    """A model whose prompt describes the tools: an answer that starts with one JSON object, maybe in a fence, is a call.

    Everything else is text, also after the call.
    """

    CALLS = tuple(CallSyntax((JsonCall(arguments),)) for arguments in ("arguments", "parameters"))

    def __init__(self, tools: Tools) -> None:
        super().__init__(tools)
        self._fence = ""
        """The part of the opening fence that was read."""
        self._to_close = ""
        """The part of the closing fence that is missing."""
        self._phase = self._head

    def _head(self, text: str, at: int) -> int:
        char = text[at]
        if char not in SPACE and char != "{":
            self._fence += char
            return self._skip(char, at) if _OPENINGS[-1].startswith(self._fence) else self._not_a_call(at)
        if self._fence not in _OPENINGS:
            return self._not_a_call(at)
        self._to_close = FENCE if self._fence else ""
        return super()._head(text, at)

    def _after(self, text: str, at: int) -> int:
        char = text[at]
        if char in SPACE:
            return self._skip(char, at)
        if not self._to_close.startswith(char):
            return self._not_a_call(at)
        self._to_close = self._to_close[1:]
        self._skip(char, at)
        if not self._to_close:
            self._opening.clear()
        return at + 1


class JsonCallsParser(ArrayParser):
    """Calls alone, as a grammar forces them: an object or an array of objects, `{"name": …, "arguments": {…}}`.

    From anything else on, the answer is text.
    """

    def __init__(self, tools: Tools) -> None:
        super().__init__(tools)
        self._phase = self._head


class PlainParser:
    """No calls: all of the answer is text. Used for whole answers and inside `ReasoningParser`; plain streams need no parser."""

    markers: frozenset[str] = frozenset()

    def feed(self, text: str) -> Sequence[Event]:
        return (TextDelta(text),) if text else ()

    def finish(self) -> Sequence[Event]:
        return ()
