"""Tool calls in JSON: one parser for each format. Some have an array after a marker:

Granite 3       <|tool_call|>[{"name": NAME, "arguments": {…}}, …]
Phi-4-mini      functools[{"name": NAME, "arguments": {…}}, …], or <|tool_call|>[…]<|/tool_call|>
Hunyuan         <tool_calls>[{"name": NAME, "arguments": {…}}, …]</tool_calls>
Apertus         <|tools_prefix|>[{NAME: {…}}, …]<|tools_suffix|>
Command A, R7B  <|START_ACTION|>[{"tool_call_id": "0", "tool_name": NAME, "parameters": {…}}, …]<|END_ACTION|>
"""

from collections.abc import Generator, Sequence
from typing import Final

from text_generation_router.chat.events import Event, Kind
from text_generation_router.chat.parsers.base import ArrayParser, CallParser, Tools
from text_generation_router.chat.parsers.readers import MAX_NAME, SPACE, ArgumentsReader, JsonCallReader
from text_generation_router.chat.parsers.syntax import CallSyntax, JsonCall, Pattern, Pieces, Slot

HERMES_START: Final = "<tool_call>"
HERMES_END: Final = "</tool_call>"
LLAMA_TAG: Final = "<|python_tag|>"
MISTRAL_CALLS: Final = "[TOOL_CALLS]"
MISTRAL_CALL_ID: Final = "[CALL_ID]"
MISTRAL_ARGS: Final = "[ARGS]"
FENCE: Final = "```"
_OPENINGS: Final = ("", FENCE, f"{FENCE}json")
GRANITE_CALLS: Final = "<|tool_call|>"
PHI_CALLS: Final = "functools"
PHI_END: Final = "<|/tool_call|>"
HUNYUAN_CALLS: Final = "<tool_calls>"
APERTUS_CALLS: Final = "<|tools_prefix|>"
COHERE_CALLS: Final = "<|START_ACTION|>"
_COHERE_FRAMES: Final = ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")
_JSON: Final = (JsonCall(),)


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
        return (Event(Kind.TEXT, text),) if text else ()

    def finish(self) -> Sequence[Event]:
        return ()


def _array(start: str, end: str = "", call: Pieces = _JSON) -> CallSyntax:
    return CallSyntax(call, (f"{start}[",), (", ",), (f"]{end}",))


class GraniteParser(ArrayParser, starts=(GRANITE_CALLS, "<tool_call>")):
    CALLS = (_array(GRANITE_CALLS), _array("<tool_call>"), _array(f"{GRANITE_CALLS} "), _array("<tool_call> "))


class PhiParser(ArrayParser, starts=(PHI_CALLS, GRANITE_CALLS), ends=(PHI_END,)):
    """Format `phi4_mini_json`."""

    CALLS = (_array(PHI_CALLS), _array(GRANITE_CALLS, PHI_END))


class HunyuanParser(ArrayParser, starts=(HUNYUAN_CALLS,), ends=("</tool_calls>",)):
    """Hunyuan A13B and the dense models."""

    CALLS = (_array(HUNYUAN_CALLS, "</tool_calls>"),)


class KeyCallReader(JsonCallReader):
    """Reads `{NAME: {…}}`. The first name counts."""

    def _member(self, key: str, char: str) -> Generator[None, str, None] | tuple[()]:
        if self.started:
            return ()
        self._start(key)
        return self._arguments(char)


class ApertusParser(ArrayParser, starts=(APERTUS_CALLS,), ends=("<|tools_suffix|>",)):
    READER = KeyCallReader
    CALLS = (_array(APERTUS_CALLS, "<|tools_suffix|>", ('{"', Slot.NAME, '": ', Slot.ARGUMENTS, "}")),)


class CohereParser(ArrayParser, starts=(COHERE_CALLS, *_COHERE_FRAMES), ends=("<|END_ACTION|>",)):
    """Format `cohere_command`. The tokens around an answer are dropped."""

    NAME_KEY = "tool_name"
    CALLS = (
        CallSyntax(
            ('{"tool_call_id": "', Pattern("[0-9]{1,3}"), '", "tool_name": "', Slot.NAME, '", "parameters": ', Slot.ARGUMENTS, "}"),
            (f"{COHERE_CALLS}[\n    ",),
            (",\n    ",),
            ("\n]<|END_ACTION|>",),
        ),
    )  # fmt: skip

    def _on_marker(self, marker: str) -> None:
        if marker not in _COHERE_FRAMES:
            super()._on_marker(marker)
