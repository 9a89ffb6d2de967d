"""Tool calls in a JSON array after a marker.

Granite 3       <|tool_call|>[{"name": NAME, "arguments": {…}}, …]
Phi-4-mini      functools[{"name": NAME, "arguments": {…}}, …], or <|tool_call|>[…]<|/tool_call|>
Hunyuan         <tool_calls>[{"name": NAME, "arguments": {…}}, …]</tool_calls>
Apertus         <|tools_prefix|>[{NAME: {…}}, …]<|tools_suffix|>
Command A, R7B  <|START_ACTION|>[{"tool_call_id": "0", "tool_name": NAME, "parameters": {…}}, …]<|END_ACTION|>
"""

from collections.abc import Generator
from typing import Final

from text_generation_router.chat.parsers.base import ArrayParser
from text_generation_router.chat.parsers.readers import JsonCallReader
from text_generation_router.chat.parsers.syntax import CallSyntax, JsonCall, Pattern, Pieces, Slot

GRANITE_CALLS: Final = "<|tool_call|>"
PHI_CALLS: Final = "functools"
PHI_END: Final = "<|/tool_call|>"
HUNYUAN_CALLS: Final = "<tool_calls>"
APERTUS_CALLS: Final = "<|tools_prefix|>"
COHERE_CALLS: Final = "<|START_ACTION|>"
_COHERE_FRAMES: Final = ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")

_JSON: Final = (JsonCall(),)


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


class CohereCallReader(JsonCallReader):
    """Reads `{"tool_name": NAME, "parameters": {…}}`."""

    NAME_KEY = "tool_name"


class CohereParser(ArrayParser, starts=(COHERE_CALLS, *_COHERE_FRAMES), ends=("<|END_ACTION|>",)):
    """Format `cohere_command`. The tokens around an answer are dropped."""

    READER = CohereCallReader
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
