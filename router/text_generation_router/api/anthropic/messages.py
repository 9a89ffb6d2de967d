"""Anthropic's Messages API: POST /v1/messages and /v1/messages/count_tokens. The events of a stream:

    message_start
    content_block_start, content_block_delta …, content_block_stop      for each block: text, tool_use or thinking
    message_delta (stop reason, usage), message_stop

An error is an event `error` in place of the rest.
"""

import secrets
from typing import Any, Literal

import orjson
from aiohttp import web
from pydantic import ConfigDict, with_config
from typing_extensions import TypeAliasType

from text_generation_router.api.anthropic.input import to_conversation, to_options
from text_generation_router.api.anthropic.schemas import CountTokensBody, MessagesBody
from text_generation_router.api.core.chat import AnswerEnd, ChatRequest, Finish
from text_generation_router.api.core.ids import Named, named
from text_generation_router.api.core.one_answer import AnswerRoutes, CachedTokens, ReplyWriter
from text_generation_router.api.http.dialects import anthropic_error_event
from text_generation_router.api.http.fields import WrittenJson
from text_generation_router.api.http.keys import tenant_of
from text_generation_router.chat.events import Kind
from text_generation_router.errors import ServingError
from text_generation_router.web.bodies import ResponseBody, beside, json_response, parse_body


class TextContentBlock(ResponseBody):
    """A text."""

    type: Literal["text"]
    text: str


class ThinkingContentBlock(ResponseBody):
    """Reasoning, with --split-reasoning."""

    type: Literal["thinking"]
    thinking: str
    signature: str
    """Always empty: reasoning is not signed."""


class ToolUseContentBlock(ResponseBody):
    """A tool call."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any] | WrittenJson


Block = TextContentBlock | ThinkingContentBlock | ToolUseContentBlock
StopReason = TypeAliasType("StopReason", Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"])


class MessageUsage(ResponseBody):
    """Token counts; the three of the prompt add up to it."""

    input_tokens: int
    """Prompt tokens that were neither read from the cache nor written to it."""
    cache_creation_input_tokens: int
    """Always 0: writing to the cache costs the client nothing here."""
    cache_read_input_tokens: int
    """Prompt tokens found in the prefix cache."""
    output_tokens: int


class MessageAnswer(ResponseBody):
    """A complete message."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Block]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


@with_config(ConfigDict(extra="allow", use_attribute_docstrings=True))
class MessageEvent(ResponseBody):
    """A named event of a streamed message; the last is message_stop or error."""

    type: str


class TokenCount(ResponseBody):
    """Length of a prompt."""

    input_tokens: int


_DELTAS = {
    Kind.TEXT: (b"text_delta", b"text"),
    Kind.REASONING: (b"thinking_delta", b"thinking"),
    Kind.ARGUMENTS: (b"input_json_delta", b"partial_json"),
}


class MessageWriter(ReplyWriter[Block]):
    def __init__(self, named: Named, prompt_tokens: int, cached_tokens: CachedTokens) -> None:
        super().__init__()
        self._prompt_tokens = prompt_tokens
        self._cached_tokens = cached_tokens
        self._message: MessageAnswer = {
            "id": named.id,
            "type": "message",
            "role": "assistant",
            "model": named.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(0),
        }
        self._block: Block
        """The open block."""
        self._delta_head = b""
        """A delta of the open block, up to what it adds."""

    def whole(self) -> MessageAnswer:
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

    def delta(self, delta: str) -> bytes:
        # Formatted by hand; only the text is escaped.
        return b"%b%b}}\n\n" % (self._delta_head, orjson.dumps(delta))

    def block_ended(self, text: str, *, whole: bool) -> tuple[Block, bytes]:
        block = self._block
        match block["type"]:
            case "text":
                block["text"] = text
            case "thinking":
                block["thinking"] = text
            case "tool_use":
                block["input"] = whole_input(text)
        return block, _event("content_block_stop", index=len(self.blocks))

    def ended(self, end: AnswerEnd) -> bytes:
        message = self._message
        reason = message["stop_reason"] = stop_reason(end)
        sequence = message["stop_sequence"] = end.ending.stop if reason == "stop_sequence" else None
        message["usage"] = self._usage(end.ending.generated_tokens)
        message["content"] = self.blocks
        stop = {"stop_reason": reason, "stop_sequence": sequence}
        return _event("message_delta", delta=stop, usage=message["usage"]) + _event("message_stop")

    def failure(self, error: ServingError) -> bytes:
        return anthropic_error_event(error)

    def _usage(self, generated_tokens: int) -> MessageUsage:
        cached_tokens = self._cached_tokens()
        return {
            "input_tokens": self._prompt_tokens - cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached_tokens,
            "output_tokens": generated_tokens,
        }


def stop_reason(end: AnswerEnd) -> StopReason:
    """The stop reason in Anthropic's terms."""
    match end.finish:
        case Finish.LENGTH:
            return "max_tokens"
        case Finish.TOOL_CALLS:
            return "tool_use"
        case Finish.STOP:
            return "end_turn" if end.ending.stop is None else "stop_sequence"


def whole_input(arguments: str) -> dict[str, Any] | orjson.Fragment:
    """The input of a call as an object; empty if the length limit cut it, because half of it would mislead."""
    try:
        value = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return {}
    # As the model wrote it: a value that can be parsed may be too deep to write.
    return orjson.Fragment(arguments) if isinstance(value, dict) else {}


def _event(name: str, /, **fields: object) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), orjson.dumps({"type": name, **fields}))


class MessagesRoutes(AnswerRoutes):
    async def create_message(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/messages: answer a conversation, whole or in events.

        With `stream` the data of each event is a `MessageEvent`.
        """
        body = await parse_body(request, MessagesBody)

        def writer(chat: ChatRequest, cached_tokens: CachedTokens) -> MessageWriter:
            head = named("msg_", body.model, self._serving.settings)
            return MessageWriter(head, chat.prompt_tokens, cached_tokens)

        return await self._answer(request, body, to_conversation, to_options, writer)

    async def count_message_tokens(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/messages/count_tokens: count the prompt tokens of a conversation.

        Tools and the chat template are counted, too. Nothing is generated.
        """
        tenant = tenant_of(request)
        body = await parse_body(request, CountTokensBody)
        self._serving.adapter_of(body.model)
        conversation = await beside(request, lambda: to_conversation(body))
        count: TokenCount = {"input_tokens": await self._chats.count_tokens(conversation, tenant)}
        return json_response(count)
