"""A route that gives one answer to a conversation, whole or as events: Responses and Messages.

    events ──► ReplyWriter ──► bytes of a stream, and the whole reply: a list of blocks, written one after the other

A writer makes both, so a stream and a whole reply never differ.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

import orjson
from aiohttp import web

from text_generation_router.api.core.chat import AnswerEnd, ChatPreparer, ChatRequest, Finish, Reader, finish_of
from text_generation_router.api.core.parameters import INPUTS, GenerationOptions
from text_generation_router.api.core.serving import MAX_LOGPROBS_AT_ONCE, Serving, paced, too_many_logprobs
from text_generation_router.api.http.caller import OpenFields
from text_generation_router.api.http.record import GenerationRecord, compute_time_header, timing_headers
from text_generation_router.chat.conversation import Conversation
from text_generation_router.chat.events import Event, Kind
from text_generation_router.errors import ServingError
from text_generation_router.generation import Sink, TokenOutput
from text_generation_router.web.bodies import beside
from text_generation_router.web.body_errors import about
from text_generation_router.web.sse import EventStream

BodyT = TypeVar("BodyT", bound=OpenFields)
BlockT = TypeVar("BlockT")
"""A block as the whole reply has it."""


CachedTokens = Callable[[], int]
"""Returns the prompt tokens found in the KV cache; 0 before the first token."""


class ReplyWriter(ABC, Generic[BlockT]):
    """Writes one answer. A block is open from its first delta until another begins or the answer ends.

    Every method returns whole events for the stream; `end` or `failed` is the last call.
    """

    scored = False
    """True if the answer has log-probabilities: `score` is called with each token before its text or its events."""

    def __init__(self) -> None:
        self.blocks: list[BlockT] = []
        """The closed blocks of the whole reply."""
        self._begun = False
        self._open: Kind | None = None
        self._parts: list[str] = []
        """The deltas of the open block."""

    def add(self, delta: str, kind: Kind = Kind.TEXT) -> bytes:
        """Add to the block of this kind."""
        # Called for each token of both dialects.
        opening = b"" if self._open is kind else self._switch_to(kind)
        self._parts.append(delta)
        return opening + self.delta(delta)

    def score(self, output: TokenOutput) -> None:
        """Take the next token."""
        raise NotImplementedError

    def events(self, events: Sequence[Event]) -> bytes:
        """Add the events of a parser."""
        return b"".join([self._event(event) for event in events])

    def end(self, end: AnswerEnd) -> bytes:
        """End the answer. An answer without blocks gets an empty text."""
        last = b"" if self._open or self.blocks else self._switch_to(Kind.TEXT)
        last += self._close(whole=end.finish is not Finish.LENGTH)
        return last + self.ended(end)

    def failed(self, error: ServingError) -> bytes:
        """End the stream with an error."""
        return self._begin() + self.failure(error)

    @abstractmethod
    def whole(self) -> object:
        """Return the whole reply. Call after `end`."""

    @abstractmethod
    def begin(self) -> bytes:
        """Return the first events of the stream."""

    @abstractmethod
    def block_began(self, kind: Kind, name: str) -> bytes:
        """Open a block of text, reasoning, or the arguments of a call of the tool `name`."""

    @abstractmethod
    def delta(self, delta: str) -> bytes:
        """Add to the open block."""

    @abstractmethod
    def block_ended(self, text: str, *, whole: bool) -> tuple[BlockT, bytes]:
        """Close the block with this text: return the block of the whole reply, and the events.

        `whole` is False if the answer was cut off inside the block.
        """

    @abstractmethod
    def ended(self, end: AnswerEnd) -> bytes:
        """Return the events after the last block."""

    @abstractmethod
    def failure(self, error: ServingError) -> bytes:
        """Return the events of an error. A block may be open."""

    def _event(self, event: Event) -> bytes:
        if event.kind is Kind.CALL:
            return self._switch_to(Kind.ARGUMENTS, event.text)
        return self.add(event.text, event.kind)

    def _begin(self) -> bytes:
        if self._begun:
            return b""
        self._begun = True
        return self.begin()

    def _switch_to(self, kind: Kind, name: str = "") -> bytes:
        before = self._begin() + self._close(whole=True)
        self._open = kind
        return before + self.block_began(kind, name)

    def _close(self, *, whole: bool) -> bytes:
        if self._open is None:
            return b""
        text = "".join(self._parts)
        self._open, self._parts = None, []
        block, events = self.block_ended(text, whole=whole)
        self.blocks.append(block)
        return events


class AnswerRoutes:
    def __init__(self, serving: Serving, chats: ChatPreparer) -> None:
        self._serving = serving
        self._chats = chats

    async def _answer(
        self,
        request: web.Request,
        body: BodyT,
        to_conversation: Callable[[BodyT], Conversation],
        to_options: Callable[[BodyT], GenerationOptions],
        writer_of: Callable[[ChatRequest, CachedTokens], ReplyWriter[Any]],
    ) -> web.StreamResponse:
        """Answer the conversation of a body. Raises ServingError."""
        serving = self._serving
        adapter = serving.adapter_of(body.model)
        records = serving.start(request)
        async with serving.take_permits(records, 1, body):
            conversation, options = await beside(request, lambda: (to_conversation(body), to_options(body)))
            qos = serving.qos(records[0], body)
            chat = await self._chats.prepare(conversation, replace(options, adapter=adapter), qos)
            writer = writer_of(chat, lambda: records[0].cached_tokens)
            headers = serving.cost_headers(len(chat.prompt))
            if body.stream:
                events = serving.stream(request, headers, writer.failed)
                sink = writer_sink(events, writer, chat, records[0])
                with about(INPUTS[options.api]), serving.run(chat.requests, records, [sink]):
                    return await events.run()
            most = MAX_LOGPROBS_AT_ONCE if writer.scored else 0
            with about(INPUTS[options.api]):
                [collector] = await serving.collect(chat.requests, records, most_logprobs=most)
            if writer.scored:
                sink = writer_sink(None, writer, chat, records[0])
                async for output in paced(collector.take_outputs()):
                    sink.on_output(output)
            else:
                parts, end = await chat.read(collector.ended.result())
                writer.events(parts)
                writer.end(end)
            headers |= timing_headers(records) | compute_time_header(records[0])
            return web.Response(body=orjson.dumps(writer.whole()), content_type="application/json", headers=headers)


def writer_sink(
    stream: EventStream | None, writer: ReplyWriter[Any], chat: ChatRequest, record: GenerationRecord
) -> Sink:
    """Return the sink of an answer, without a parser if the answer is text only. `stream` is None for a whole reply."""
    sink = WriterSink(stream, writer, record)
    return sink if chat.form.is_plain else Reader(chat.form.parser(), sink)


class WriterSink(Sink):
    """Sends what a `ReplyWriter` returns. A sink of outputs for plain text, a sink of events behind a parser."""

    def __init__(self, stream: EventStream | None, writer: ReplyWriter[Any], record: GenerationRecord) -> None:
        self._stream = stream
        self._send = (lambda event: None) if stream is None else stream.send
        self._writer = writer
        self._add = writer.add
        self._record = record
        self._scored = writer.scored
        self._room = MAX_LOGPROBS_AT_ONCE
        """Log-probabilities that may follow: the last events repeat all of them."""

    def on_output(self, output: TokenOutput) -> None:
        if self._scored:
            self._score(output)
        event = self._add(output.delta) if output.delta else b""
        ending = output.ending
        if ending is None:
            if event:
                self._send(event)
            return
        self._last(AnswerEnd(finish_of(ending, calls=False), ending), event)

    def on_events(self, events: Sequence[Event], output: TokenOutput) -> None:
        if self._scored:
            self._score(output)
        if events:
            self._send(self._writer.events(events))

    def on_end(self, end: AnswerEnd) -> None:
        self._last(end, b"")

    def on_failure(self, error: ServingError) -> None:
        assert self._stream is not None, "the text of a whole reply is finished"
        self._record.failed(error)
        self._stream.fail(error)

    def _last(self, end: AnswerEnd, before: bytes) -> None:
        self._record.ending = end.ending
        self._send(before + self._writer.end(end))
        if self._stream is not None:
            self._stream.close()

    def _score(self, output: TokenOutput) -> None:
        self._room -= 1 + len(output.top)
        if self._room < 0:
            self.on_failure(too_many_logprobs("new tokens", MAX_LOGPROBS_AT_ONCE))
        else:
            self._writer.score(output)
