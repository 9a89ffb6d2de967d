"""Writers of a streamed chat: ChatChunk events, exact to the byte.

Every delta has the role: some of TGI's clients need it. The last chunk of a choice has the finish reason. After every
choice has ended follow the usage, if requested, and [DONE].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import orjson

from text_generation_router.api.core.chat import AnswerEnd, ChatRequest, Reader, finish_of
from text_generation_router.api.core.ids import Named, new_call_id
from text_generation_router.api.http.dialects import DONE
from text_generation_router.api.http.record import GenerationRecord, cached_tokens
from text_generation_router.api.http.sse import EventStream
from text_generation_router.api.openai.answers import (
    ChatFinish,
    ChatLogprobs,
    Delta,
    FunctionDelta,
    chat_finish,
    content_logprobs,
    usage,
)
from text_generation_router.chat.events import Event, ReasoningDelta, TextDelta, ToolCallStart
from text_generation_router.errors import ServingError
from text_generation_router.generation import Sink, TokenOutput
from text_generation_router.request import LogprobJson, TokenId
from text_generation_router.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Shown:
    """The optional parts of a stream."""

    role_once: bool = False
    """Only the first delta of a choice has the role."""
    functions: bool = False
    """A call is a `function_call`, the older form."""
    logprobs: bool = False
    usage: bool = False
    """A last chunk with the token counts."""
    running_usage: bool = False
    """The token counts so far on every chunk."""


class ChatStream:
    """The stream of one request, with all its choices."""

    def __init__(
        self,
        stream: EventStream,
        named: Named,
        chat: ChatRequest,
        records: Sequence[GenerationRecord],
        tokenizer: Tokenizer,
        shown: Shown,
    ) -> None:
        self.stream = stream
        self.shown = shown
        self._tokenizer = tokenizer
        self._chat = chat
        self._records = records
        self._head = named.head("chat.completion.chunk")
        self._open = len(chat.requests)
        self._generated = self._reasoning = 0

    def sinks(self) -> list[Sink]:
        """The sink of each choice."""
        choices = [ChatChoiceStream(self, index, record) for index, record in enumerate(self._records)]
        if self._chat.form.is_plain:
            return list(choices)
        return [Reader(self._chat.form.parser(), choice) for choice in choices]

    def head(self, index: int) -> bytes:
        """The start of a chunk, up to its delta."""
        return b'data: %b,"choices":[{"index":%d,"delta":' % (self._head, index)

    def logprobs(self, outputs: Sequence[TokenOutput]) -> ChatLogprobs:
        """The log-probabilities of tokens."""
        return content_logprobs(outputs, self._tokenizer, self._chat.requests[0].logprobs.top_n)

    def usage(self, generated: int, reasoning: int | None = None) -> bytes:
        """The token counts as JSON; without those of the reasoning before the end."""
        return orjson.dumps(usage(self._chat.prompt_tokens, generated, cached_tokens(self._records), reasoning))

    def ended(self, generated: int, reasoning: int) -> bytes:
        """Count the end of a choice; return the events that follow the last one."""
        self._open -= 1
        self._generated += generated
        self._reasoning += reasoning
        if self._open:
            return b""
        if not self.shown.usage:
            return DONE
        return b'data: %b,"choices":[],"usage":%b}\n\n%b' % (
            self._head,
            self.usage(self._generated, self._reasoning),
            DONE,
        )

    def close(self) -> None:
        """Close the stream if every choice has ended."""
        if not self._open:
            self.stream.close()


class ChatChoiceStream(Sink):
    """The sink of one choice: of outputs without a parser, of a parser's events with one."""

    __slots__ = (
        "_chat",
        "_count",
        "_first",
        "_head",
        "_ids",
        "_plain",
        "_record",
        "_role",
        "_stream",
        "_text_head",
        "_unscored",
    )

    def __init__(self, chat: ChatStream, index: int, record: GenerationRecord) -> None:
        self._chat = chat
        self._stream = chat.stream
        self._record = record
        self._head = chat.head(index)
        self._role: Delta = {} if chat.shown.role_once else {"role": "assistant"}
        self._text_head = self._head + orjson.dumps(self._role | {"content": ""}).removesuffix(b'""}')
        """A chunk of text, up to the text."""
        self._plain = not (chat.shown.logprobs or chat.shown.running_usage)
        self._count = 0
        self._ids: list[str] = []
        self._unscored: list[TokenOutput] = []
        """Tokens whose log-probabilities belong to the next chunk: a parser may hold their text back."""
        self._first = (
            b'%b{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],"usage":' % self._head
        )
        """Sent before the first chunk with content; its usage counts no new token."""
        if self._plain:
            self._first += b"null}\n\n"

    def on_text(self, number: int, token_id: TokenId, text: str, logprob: LogprobJson) -> None:
        # The hot path of chats: a ChatChunk formatted by hand, in which only the text is escaped.
        if not self._plain:
            super().on_text(number, token_id, text, logprob)
        elif text:
            head = self._opening() + self._text_head if self._first else self._text_head
            self._stream.send(
                b'%b%b},"logprobs":null,"finish_reason":null}],"usage":null}\n\n' % (head, orjson.dumps(text))
            )

    def on_output(self, output: TokenOutput) -> None:
        self._count = output.number
        ending = output.ending
        delta: Delta = {"content": output.delta}
        self._hold_logprobs(output)
        if ending is not None:
            self._end(delta, AnswerEnd(finish_of(ending, calls=False), ending))
        elif output.delta or self._unscored:
            self._stream.send(self._opening() + self._chunk(delta))

    def on_events(self, events: Sequence[Event], output: TokenOutput) -> None:
        self._count = output.number
        self._hold_logprobs(output)
        if events:
            self._stream.send(self._opening() + b"".join(self._chunk(self._delta(event)) for event in events))

    def on_end(self, end: AnswerEnd) -> None:
        self._end({}, end)

    def on_failure(self, error: ServingError) -> None:
        self._record.failed(error)
        self._chat.stream.fail(error)

    def _end(self, delta: Delta, end: AnswerEnd) -> None:
        self._record.ending = end.ending
        chunk = self._opening() + self._chunk(delta, chat_finish(end.finish, functions=self._chat.shown.functions))
        self._stream.send(chunk + self._chat.ended(end.ending.generated_tokens, end.reasoning_tokens))
        self._chat.close()

    def _hold_logprobs(self, output: TokenOutput) -> None:
        if self._chat.shown.logprobs:
            self._unscored.append(output)

    def _usage(self, count: int) -> bytes:
        return self._chat.usage(count) if self._chat.shown.running_usage else b"null"

    def _opening(self) -> bytes:
        first, self._first = self._first, b""
        if not first or self._plain:
            return first
        return b"%b%b}\n\n" % (first, self._usage(0))

    def _delta(self, event: Event) -> Delta:
        match event:
            case TextDelta(text):
                return {"content": text}
            case ReasoningDelta(text):
                return {"reasoning_content": text}
            case ToolCallStart(_, name) if self._chat.shown.functions:
                return {"function_call": {"name": name, "arguments": ""}}
            case ToolCallStart(index, name):
                self._ids.append(new_call_id())
                function: FunctionDelta = {"name": name, "arguments": ""}
                return {
                    "tool_calls": [{"index": index, "id": self._ids[index], "type": "function", "function": function}]
                }
        if self._chat.shown.functions:
            return {"function_call": {"arguments": event.fragment}}
        return {"tool_calls": [{"index": event.index, "function": {"arguments": event.fragment}}]}

    def _chunk(self, delta: Delta, finish: ChatFinish | None = None) -> bytes:
        unscored, self._unscored = self._unscored, []
        return b'%b%b,"logprobs":%b,"finish_reason":%b}],"usage":%b}\n\n' % (
            self._head,
            orjson.dumps({**self._role, **delta}),
            orjson.dumps(self._chat.logprobs(unscored) if unscored else None),
            orjson.dumps(finish),
            self._usage(self._count),
        )
