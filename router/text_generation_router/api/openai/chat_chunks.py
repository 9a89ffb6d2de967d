"""Writers of a streamed chat: ChatChunk events, exact to the byte.

Every delta has the role: some of TGI's clients need it. The last chunk of a choice has the finish reason. After every
choice has ended follow the usage, if requested, and [DONE].
"""

from collections.abc import Sequence

import orjson

from text_generation_router.api.core.chat import AnswerEnd, ChatRequest, Reader, finish_of
from text_generation_router.api.core.ids import Named, new_call_id
from text_generation_router.api.http.record import GenerationRecord
from text_generation_router.api.openai.answers import (
    ChatFinish,
    ChatLogprobs,
    Delta,
    FunctionDelta,
    Usage,
    chat_finish,
    chat_usage,
    content_logprobs,
)
from text_generation_router.api.openai.choices import ChoiceSink, ChoicesStream
from text_generation_router.api.openai.schemas import ChatBody
from text_generation_router.chat.events import Event, ReasoningDelta, TextDelta, ToolCallStart
from text_generation_router.generation import Sink, TokenOutput
from text_generation_router.request import LogprobJson, TokenId
from text_generation_router.text.tokenizer import Tokenizer
from text_generation_router.web.sse import EventStream


class ChatStream(ChoicesStream):
    def __init__(
        self,
        stream: EventStream,
        named: Named,
        body: ChatBody,
        chat: ChatRequest,
        records: Sequence[GenerationRecord],
        tokenizer: Tokenizer,
        *,
        role_once: bool,
    ) -> None:
        """`role_once`: only the first delta of a choice has the role."""
        super().__init__(stream, named.head("chat.completion.chunk"), body, records, b"delta")
        self.role: Delta = {} if role_once else {"role": "assistant"}
        self.functions = bool(body.functions)
        """A call is a `function_call`, the older form."""
        self.scored = bool(body.logprobs)
        self._tokenizer = tokenizer
        self._chat = chat
        self._predicted = body.prediction is not None

    def sinks(self) -> list[Sink]:
        choices = [ChatChoiceStream(self, index, record) for index, record in enumerate(self._records)]
        if self._chat.form.is_plain:
            return list(choices)
        return [Reader(self._chat.form.parser(), choice) for choice in choices]

    def logprobs(self, outputs: Sequence[TokenOutput]) -> ChatLogprobs:
        return content_logprobs(outputs, self._tokenizer, self._chat.requests[0].logprobs.top_n)

    def usage(self, generated: int, reasoning: int | None) -> Usage:
        tokens = self._chat.prompt_tokens
        return chat_usage(tokens, generated, reasoning, self._records, predicted=self._predicted)


class ChatChoiceStream(ChoiceSink):
    """The sink of one choice: of outputs without a parser, of a parser's events with one."""

    __slots__ = ("_chat", "_count", "_first", "_ids", "_plain", "_text_head", "_unscored")

    def __init__(self, chat: ChatStream, index: int, record: GenerationRecord) -> None:
        super().__init__(chat, index, record)
        self._chat = chat
        self._text_head = self._head + orjson.dumps(chat.role | {"content": ""}).removesuffix(b'""}')
        """A chunk of text, up to the text."""
        self._plain = not (chat.scored or chat.running_usage)
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

    def _end(self, delta: Delta, end: AnswerEnd) -> None:
        chunk = self._opening() + self._chunk(delta, chat_finish(end.finish, functions=self._chat.functions))
        self._send_last(chunk, end.ending, end.reasoning_tokens)

    def _hold_logprobs(self, output: TokenOutput) -> None:
        if self._chat.scored:
            self._unscored.append(output)

    def _usage(self, count: int) -> bytes:
        return orjson.dumps(self._chat.usage(count, None)) if self._chat.running_usage else b"null"

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
            case ToolCallStart(_, name) if self._chat.functions:
                return {"function_call": {"name": name, "arguments": ""}}
            case ToolCallStart(index, name):
                self._ids.append(new_call_id())
                function: FunctionDelta = {"name": name, "arguments": ""}
                return {
                    "tool_calls": [{"index": index, "id": self._ids[index], "type": "function", "function": function}]
                }
        if self._chat.functions:
            return {"function_call": {"arguments": event.fragment}}
        return {"tool_calls": [{"index": event.index, "function": {"arguments": event.fragment}}]}

    def _chunk(self, delta: Delta, finish: ChatFinish | None = None) -> bytes:
        unscored, self._unscored = self._unscored, []
        return b'%b%b,"logprobs":%b,"finish_reason":%b}],"usage":%b}\n\n' % (
            self._head,
            orjson.dumps({**self._chat.role, **delta}),
            orjson.dumps(self._chat.logprobs(unscored) if unscored else None),
            orjson.dumps(finish),
            self._usage(self._count),
        )
