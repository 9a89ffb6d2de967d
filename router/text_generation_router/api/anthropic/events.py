"""What a Messages stream says, to the byte:

    message_start
    content_block_start, content_block_delta …, content_block_stop      for each block: text, tool_use or thinking
    message_delta (why it ended, usage), message_stop

A failure is an event `error` in place of the rest. Thoughts are not signed: their signature is empty.
"""

from __future__ import annotations

import secrets
from typing import Any

import orjson

from text_generation_router.api.core.blocks import CachedTokens, Kind, Script
from text_generation_router.api.core.chat import AnswerEnd, Finish
from text_generation_router.api.core.ids import Named
from text_generation_router.api.http.dialects import anthropic_error_event
from text_generation_router.errors import ServingError

Json = dict[str, Any]

_DELTAS = {
    Kind.TEXT: (b"text_delta", b"text"),
    Kind.REASONING: (b"thinking_delta", b"thinking"),
    Kind.CALL: (b"input_json_delta", b"partial_json"),
}


class MessageScript(Script):
    """Writes a message down."""

    def __init__(self, named: Named, prompt_tokens: int, cached_tokens: CachedTokens) -> None:
        super().__init__()
        self._message: Json = {
            "id": named.id,
            "type": "message",
            "role": "assistant",
            "model": named.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }
        self._prompt_tokens = prompt_tokens
        self._cached_tokens = cached_tokens
        self._block: Json = {}
        """The open block, as it began."""
        self._delta_head = b""
        """A delta of the open block, up to what it adds."""

    def whole(self) -> Json:
        return self._message

    def begin(self) -> bytes:
        self._message["usage"] = self._usage(0)
        return _event("message_start", message=self._message)

    def block_began(self, kind: Kind, name: str) -> bytes:
        if kind is Kind.TEXT:
            self._block = {"type": "text", "text": ""}
        elif kind is Kind.REASONING:
            self._block = {"type": "thinking", "thinking": "", "signature": ""}
        else:
            self._block = {"type": "tool_use", "id": f"toolu_{secrets.token_hex(12)}", "name": name, "input": {}}
        index = len(self.blocks)
        delta, field = _DELTAS[kind]
        self._delta_head = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,%b' % (
            index,
            b'"delta":{"type":"%b","%b":' % (delta, field),
        )
        return _event("content_block_start", index=index, content_block=self._block)

    def text_delta(self, delta: str) -> bytes:
        # Formatted by hand, and only the text is escaped.
        return b"%b%b}}\n\n" % (self._delta_head, orjson.dumps(delta))

    reasoning_delta = text_delta
    arguments_delta = text_delta

    def block_ended(self, kind: Kind, text: str, *, whole: bool) -> tuple[Json, bytes]:
        value = whole_input(text) if kind is Kind.CALL else text
        field = {Kind.TEXT: "text", Kind.REASONING: "thinking", Kind.CALL: "input"}[kind]
        return self._block | {field: value}, _event("content_block_stop", index=len(self.blocks))

    def ended(self, end: AnswerEnd) -> bytes:
        reason = stop_reason(end)
        stop = {"stop_reason": reason, "stop_sequence": end.ending.stop if reason == "stop_sequence" else None}
        counts = self._usage(end.ending.generated_tokens)
        self._message |= {"content": self.blocks, **stop, "usage": counts}
        return _event("message_delta", delta=stop, usage=counts) + _event("message_stop")

    def failure(self, error: ServingError) -> bytes:
        return anthropic_error_event(error)

    def _usage(self, generated_tokens: int) -> Json:
        return usage(self._prompt_tokens, generated_tokens, self._cached_tokens())


def stop_reason(end: AnswerEnd) -> str:
    """Why an answer ended, in Anthropic's words."""
    match end.finish:
        case Finish.LENGTH:
            return "max_tokens"
        case Finish.TOOL_CALLS:
            return "tool_use"
        case Finish.STOP:
            return "end_turn" if end.ending.stop is None else "stop_sequence"


def whole_input(arguments: str) -> Json | orjson.Fragment:
    """A call's input as an object. One that was cut short by the answer's length is empty: half of it would mislead."""
    try:
        value = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return {}
    # As the model wrote it: what can be read may be too deep to be written again.
    return orjson.Fragment(arguments) if isinstance(value, dict) else {}


def usage(prompt_tokens: int, generated_tokens: int, cached_tokens: int) -> Json:
    """The counts. A prompt is the sum of its three: Anthropic's `input_tokens` are those that no cache was used for.

    None is ever said to have been written to the cache, which costs the client nothing here.
    """
    return {
        "input_tokens": prompt_tokens - cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached_tokens,
        "output_tokens": generated_tokens,
    }


def _event(name: str, /, **fields: object) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), orjson.dumps({"type": name, **fields}))
