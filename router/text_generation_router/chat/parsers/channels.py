"""Answers in channels: reasoning, text and calls are apart by special tokens.

Harmony, the format of gpt-oss, has messages:

    <|channel|>analysis<|message|>…<|end|>                                      reasoning
    <|start|>assistant<|channel|>commentary<|message|>…<|end|>                  text before calls
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>
    <|start|>assistant<|channel|>final<|message|>…<|return|>                    the answer

The prompt ends with `<|start|>assistant`. The recipient may also stand before the channel.

Gemma 4: `<|channel>thought\\n…<channel|>` for reasoning, `<|tool_call>call:NAME{key:<|"|>text<|"|>}<tool_call|>` for calls.
FunctionGemma: `<start_function_call>call:NAME{key:<escape>text<escape>}<end_function_call>`.
"""

import re
from collections.abc import Callable, Sequence
from typing import ClassVar, Final

from text_generation_router.chat.events import Event
from text_generation_router.chat.parsers.base import CallParser, Markers, Tools
from text_generation_router.chat.parsers.literals import LiteralCallReader
from text_generation_router.chat.parsers.readers import MAX_NAME, ArgumentsReader, CallReader
from text_generation_router.chat.parsers.syntax import CallSyntax, Slot, Until

HARMONY_CHANNEL: Final = "<|channel|>"
HARMONY_ASSISTANT: Final = "<|start|>assistant"
HARMONY_ANSWER: Final = "<|channel|>final<|message|>"
HARMONY_THOUGHT: Final = ("<|channel|>analysis<|message|>", Until("<|end|>"), HARMONY_ASSISTANT)
HARMONY_CALL: Final = "<|channel|>commentary to=functions <|constrain|>json<|message|>"

_START: Final = "<|start|>"
_MESSAGE: Final = "<|message|>"
_ENDS: Final = ("<|end|>", "<|call|>", "<|return|>")
_HEADERS: Final = (_START, HARMONY_CHANNEL, _MESSAGE, "to=")
"""Starts of a header."""
_MAX_HEADER: Final = MAX_NAME + 128
_RECIPIENT: Final = re.compile(r"\bto=([^\s<]+)")
_ANALYSIS: Final = re.compile(r"<\|channel\|>\s*analysis")
_WHOLE_HEADER: Final = re.compile(
    r"\s*(?:<\|start\|>\w*)?\s*(?:to=[^\s<]+)?\s*<\|channel\|>\s*(?:analysis|commentary|final)"
    r"(?:\s*to=[^\s<{]+)?\s*(?:<\|constrain\|>\s*\w+|json\b|code\b)?\s*"
)
_PARTS: Final = ("to=", "<|constrain|>", "json", "code")
"""Starts of the parts of a header after the channel."""

GEMMA_CALL: Final = "<|tool_call>"
_CALL_END: Final = "<tool_call|>"
FUNCTION_CALL: Final = "<start_function_call>"
_FUNCTION_END: Final = "<end_function_call>"
_MARK: Final = '<|"|>'
_FUNCTION_MARK: Final = "<escape>"
"""Stand around strings."""
_CHANNEL: Final = "<|channel>"
_CHANNEL_END: Final = "<channel|>"
_THOUGHT: Final = "thought\n"
GEMMA_THOUGHT: Final = (_CHANNEL, Until(_CHANNEL_END), Slot.GAP)


class HarmonyParser(CallParser):
    """Reads messages. A message to an unknown recipient, and text without a header, are text of the answer.

    Messages of one kind that follow each other are separated by a newline. `<|message|>` may be missing. An incomplete header
    is dropped.
    """

    MARKERS = Markers((*_ENDS, _START, HARMONY_CHANNEL))
    SPECIAL = frozenset((*_ENDS, _START, HARMONY_CHANNEL, _MESSAGE, "<|constrain|>"))
    # The token after a call, `<|call|>`, ends the answer.
    CALLS = tuple(
        CallSyntax((*head, f"{kind}{_MESSAGE}", Slot.ARGUMENTS))
        for kind in (" <|constrain|>json", " json", "")
        for head in (
            ("<|channel|>commentary to=functions.", Slot.NAME),
            (" to=functions.", Slot.NAME, "<|channel|>commentary"),
        )
    )
    _HEADER_ENDS = Markers((_MESSAGE, *_ENDS, _START))

    def __init__(self, tools: Tools) -> None:
        super().__init__(tools)
        self._content = self._add_content
        self._written = ""
        """The header, as far as it was read."""
        self._emit: Callable[[str], None] = self._events.text
        """Takes the content of the message."""
        self._last: object = None
        """`_emit` of the text before; None at the start and after a call."""
        self._separator = ""
        self._phase = self._header

    def finish(self) -> Sequence[Event]:
        if self._phase == self._header:
            self._no_message(self._written + self._rest)
            self._phase = self._after
        elif self._phase == self._text:
            self._content(self._rest)
            self._phase = self._after
        return super().finish()

    def _header(self, text: str, at: int) -> int:
        before = self._written
        start, end = self._HEADER_ENDS.find(text, at, _MAX_HEADER - len(before))
        self._written += text[at:start]
        header = self._written.lstrip()
        if not any(known.startswith(header[: len(known)]) for known in _HEADERS):
            return self._no_header(before, at)
        if len(self._written) > _MAX_HEADER:
            at += _MAX_HEADER - len(before)
            written = self._written[:_MAX_HEADER]
            return at if self._is_message(written) else self._no_header(written, at)
        if start == end:
            return self._hold(text, start)
        if text[start:end] == _MESSAGE:
            self._message(header)
        else:
            self._no_message(self._written)
            self._on_marker(text[start:end])
        return end

    def _no_header(self, text: str, at: int) -> int:
        """Treat `text` and all from `at` on as text."""
        self._open(self._events.text)
        self._content(text)
        return at

    def _message(self, header: str) -> None:
        """Start the message with this header."""
        recipient = _RECIPIENT.search(header)
        name = recipient[1].removeprefix("functions.") if recipient else ""
        if name in self._tools:
            self._open(self._events.text)
            self._last = None
            self._events.start(name)
            self._read(ArgumentsReader(self._events))
        else:
            self._open(self._events.reason if _ANALYSIS.search(header) else self._events.text)

    def _open(self, emit: Callable[[str], None]) -> None:
        self._separator = "\n" if self._last == emit else ""
        self._emit = emit
        self._phase = self._text

    def _is_message(self, header: str) -> bool:
        """Read a header without `<|message|>` and the content behind its parts; False without content."""
        parts = _WHOLE_HEADER.match(header)
        body = header[parts.end() :] if parts else ""
        if not body or any(part.startswith(body) for part in _PARTS):
            return False
        self._message(header[: len(header) - len(body)])
        at = self._call(body, 0) if self._phase == self._call else 0
        if self._phase == self._raw:
            self._events.arguments(body[at:])
        else:
            self._content(body[at:])
        return True

    def _no_message(self, header: str) -> None:
        """Handle a header without `<|message|>`: with content a message, else text, unless it begins with a special token."""
        if not self._is_message(header) and not header.lstrip().startswith("<|"):
            self._emit(header.strip() and header)

    def _add_content(self, piece: str) -> None:
        if piece:
            self._emit(self._separator + piece)
            self._separator = ""
            self._last = self._emit

    def _on_marker(self, marker: str) -> None:
        self._written = "" if marker in _ENDS else marker
        self._phase = self._header


def _calls(start: str, end: str, mark: str) -> tuple[CallSyntax, ...]:
    return (CallSyntax((f"{start}call:", Slot.NAME, "{", Until(end, inside=(mark,))), blocks=True),)


class FunctionGemmaParser(CallParser, starts=(FUNCTION_CALL,), ends=(_FUNCTION_END,)):
    """FunctionGemma. The end tokens may be missing; without a start before it, that of a call is text."""

    MARK: ClassVar = _FUNCTION_MARK
    SPECIAL = frozenset({FUNCTION_CALL, _FUNCTION_END, _FUNCTION_MARK})
    CALLS = _calls(FUNCTION_CALL, _FUNCTION_END, _FUNCTION_MARK)

    def _head(self, text: str, at: int) -> int:
        return self._named(text, at)

    def _call_name(self, opening: str) -> str:
        return opening.removeprefix(self._opening[0]).strip().removeprefix("call:").removeprefix(":").strip()

    def _arguments_reader(self) -> CallReader:
        return LiteralCallReader(self._events, self.MARK)


class Gemma4Parser(FunctionGemmaParser, starts=(GEMMA_CALL, _CHANNEL, _CHANNEL_END), ends=(_CALL_END,)):
    """Reads also reasoning."""

    MARK = _MARK
    SPECIAL = frozenset({GEMMA_CALL, _CALL_END, _CHANNEL, _CHANNEL_END, _MARK})
    CALLS = _calls(GEMMA_CALL, _CALL_END, _MARK)
    _ENDS_OF_REASONING = Markers((_CHANNEL_END, GEMMA_CALL))

    def __init__(self, tools: Tools) -> None:
        super().__init__(tools)
        self._held = ""
        """The name of the channel, then the newline at the end of the reasoning, as far as they were read."""
        self._in_thought = False
        """The name of the channel was read."""

    def finish(self) -> Sequence[Event]:
        if self._phase == self._reasoning:
            self._events.reason(self._held + self._rest if self._in_thought else "")
            self._phase = self._after
        return super().finish()

    def _on_marker(self, marker: str) -> None:
        if marker == _CHANNEL:
            self._held = ""
            self._in_thought = False
            self._phase = self._reasoning
        elif marker != _CHANNEL_END:
            super()._on_marker(marker)

    def _reasoning(self, text: str, at: int) -> int:
        start, end = self._ENDS_OF_REASONING.find(text, at)
        self._reason(text[at:start])
        if start == end:
            return self._hold(text, start)
        if not self._in_thought and self._held.strip() != _THOUGHT.strip():
            self._events.reason(self._held)
        if text[start:end] == GEMMA_CALL:
            self._phase = self._text
            return start
        self._phase = self._after_reasoning
        return end

    def _reason(self, piece: str) -> None:
        piece = self._held + piece
        if not self._in_thought:
            self._held = piece
            if _THOUGHT.startswith(piece):
                return
            self._in_thought = True
            piece = piece.removeprefix(_THOUGHT)
        self._held = "\n" if piece.endswith("\n") else ""
        self._events.reason(piece.removesuffix("\n"))

    def _after_reasoning(self, text: str, at: int) -> int:
        if text[at] == "\n":
            return at + 1
        self._phase = self._text
        return at
