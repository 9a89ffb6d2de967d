"""A route that gives one answer to a conversation, whole or as events, written by a script."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import orjson
from aiohttp import web

from text_generation_router.api.core.blocks import CachedTokens, Script
from text_generation_router.api.core.chat import AnswerEnd, ChatPreparer, ChatRequest, Reader, finish_of
from text_generation_router.api.core.parameters import GenerationOptions
from text_generation_router.api.core.serving import MAX_LOGPROBS_AT_ONCE, Serving, paced, too_many_logprobs
from text_generation_router.api.http.bodies import beside
from text_generation_router.api.http.caller import QosFields
from text_generation_router.api.http.record import GenerationRecord, compute_time_header, timing_headers
from text_generation_router.chat.conversation import Conversation
from text_generation_router.chat.events import Event
from text_generation_router.errors import ServingError
from text_generation_router.generation import Sink, TokenOutput


async def answer(
    request: web.Request,
    serving: Serving,
    chats: ChatPreparer,
    read: Callable[[], tuple[Conversation, GenerationOptions]],
    script_of: Callable[[ChatRequest, CachedTokens], Script[Any]],
    *,
    fields: QosFields,
    stream: bool,
) -> web.StreamResponse:
    """Answer the conversation that `read` returns. Raises ServingError."""
    records = serving.start(request)
    async with serving.take_permits(records, 1, fields):
        conversation, options = await beside(request, read)
        chat = await chats.prepare(conversation, options, serving.qos(records[0], fields))
        script = script_of(chat, lambda: records[0].cached_tokens)
        headers = serving.cost_headers(len(chat.prompt))
        if stream:
            events = serving.stream(request, headers, script.failed)
            with serving.run(chat.requests, records, [script_sink(events, script, chat, records[0])]):
                return await events.run()
        [collector] = await serving.collect(
            chat.requests, records, most_logprobs=MAX_LOGPROBS_AT_ONCE if script.scored else 0
        )
        if script.scored:
            sink = script_sink(Unsent(), script, chat, records[0])
            async for output in paced(collector.take_outputs()):
                sink.on_output(output)
        else:
            parts, end = await chat.read(collector.ended.result())
            script.events(parts)
            script.end(end)
        headers |= timing_headers(records) | compute_time_header(records[0])
        return web.Response(body=orjson.dumps(script.whole()), content_type="application/json", headers=headers)


class Events(Protocol):
    """A stream of events."""

    def send(self, event: bytes) -> None: ...
    def close(self) -> None: ...
    def fail(self, error: ServingError) -> None: ...


class Unsent:
    """A stream that nothing is sent on: the reply is whole."""

    def send(self, event: bytes) -> None:
        """Drop an event."""

    def close(self) -> None:
        """Do nothing."""

    def fail(self, error: ServingError) -> None:
        raise AssertionError("the text is finished") from error


def script_sink(stream: Events, script: Script[Any], chat: ChatRequest, record: GenerationRecord) -> Sink:
    """Return the sink of a streamed answer, without a parser if the answer is text only."""
    sink = (ScoredSink if script.scored else ScriptSink)(stream, script, record)
    return sink if chat.form.is_plain else Reader(chat.form.parser(), sink)


class ScriptSink(Sink):
    """Sends what a script writes. A sink of outputs for plain text, a sink of events behind a parser."""

    def __init__(self, stream: Events, script: Script[Any], record: GenerationRecord) -> None:
        self._stream = stream
        self._send = stream.send
        self._script = script
        self._text = script.text
        self._record = record

    def on_output(self, output: TokenOutput) -> None:
        event = self._text(output.delta) if output.delta else b""
        ending = output.ending
        if ending is None:
            if event:
                self._send(event)
            return
        self._last(AnswerEnd(finish_of(ending, calls=False), ending), event)

    def on_events(self, events: Sequence[Event], output: TokenOutput) -> None:
        if events:
            self._send(self._script.events(events))

    def on_end(self, end: AnswerEnd) -> None:
        self._last(end, b"")

    def on_failure(self, error: ServingError) -> None:
        self._record.failed(error)
        self._stream.fail(error)

    def _last(self, end: AnswerEnd, before: bytes) -> None:
        self._record.ending = end.ending
        self._send(before + self._script.end(end))
        self._stream.close()


class ScoredSink(ScriptSink):
    """The same for a script that writes log-probabilities, the last events all of them again."""

    def __init__(self, stream: Events, script: Script[Any], record: GenerationRecord) -> None:
        super().__init__(stream, script, record)
        self._room = MAX_LOGPROBS_AT_ONCE

    def on_output(self, output: TokenOutput) -> None:
        self._score(output)
        super().on_output(output)

    def on_events(self, events: Sequence[Event], output: TokenOutput) -> None:
        self._score(output)
        super().on_events(events, output)

    def _score(self, output: TokenOutput) -> None:
        self._room -= 1 + len(output.top)
        if self._room < 0:
            self.on_failure(too_many_logprobs("new tokens", MAX_LOGPROBS_AT_ONCE))
        else:
            self._script.score(output)
