"""What a streamed completion says, to the byte: a chunk a token, the choices as they come, then usage and [DONE]."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from text_generation_proto.values import FinishReason
from text_generation_router.api.core.ids import Named
from text_generation_router.api.http.dialects import DONE
from text_generation_router.api.http.record import GenerationRecord, cached_tokens
from text_generation_router.api.http.sse import EventStream
from text_generation_router.api.openai.completion_logprobs import LogprobColumns
from text_generation_router.api.openai.schemas import CompletionBody, StreamOptions
from text_generation_router.api.openai.usage import usage_json
from text_generation_router.errors import ServingError
from text_generation_router.generation import Piece, Sink
from text_generation_router.request import LogprobJson, Request, TopToken
from text_generation_router.text.tokenizer import Tokenizer

Json = dict[str, Any]


class CompletionStream:
    """The chunks of one request, for all its choices."""

    def __init__(
        self, stream: EventStream, named: Named, body: CompletionBody, prompts: Sequence[str], tokenizer: Tokenizer
    ) -> None:
        self.stream = stream
        self.body = body
        self.tokenizer = tokenizer
        options = body.stream_options or StreamOptions()
        self._usage = bool(options.include_usage)
        self.running_usage = bool(options.continuous_usage_stats)
        self.hidden = body.max_tokens == 0
        self._head = named.head("text_completion")
        self._prompts = prompts
        self._prompt_tokens = 0
        self._records: list[Sequence[GenerationRecord]] = []
        """By prompt."""
        self._generated = 0
        self._open = 0

    def sinks(self, requests: Sequence[Request], records: Sequence[GenerationRecord]) -> list[Sink]:
        """One for each choice; a prompt's choices stand side by side."""
        self._open = len(requests)
        answers = len(requests) // len(self._prompts)
        self._prompt_tokens = sum(len(request.prompt) for request in requests[::answers])
        self._records = by_prompt(records, len(self._prompts))
        return [
            ChoiceChunks(self, index, request, record, self._prompts[index // answers])
            for index, (request, record) in enumerate(zip(requests, records, strict=True))
        ]

    def head(self, index: int) -> bytes:
        """The beginning of a chunk, up to its text."""
        return b'data: %b,"choices":[{"index":%d,"text":' % (self._head, index)

    def ended(self, generated: int) -> bytes:
        """A choice ended; what is left to say once all have."""
        self._open -= 1
        self._generated += 0 if self.hidden else generated
        if self._open:
            return b""
        if not self._usage:
            return DONE
        usage = usage_json(self._prompt_tokens, self._generated, sum(map(cached_tokens, self._records)))
        return b'data: %b,"choices":[],"usage":%b}\n\n%b' % (self._head, usage, DONE)

    def close(self) -> None:
        """Close the stream if no choice is left."""
        if not self._open:
            self.stream.close()


def by_prompt(records: Sequence[GenerationRecord], prompts: int) -> list[Sequence[GenerationRecord]]:
    """The generations of each of so many prompts: the same number for each, one prompt's beside each other."""
    answers = len(records) // prompts
    return [records[first : first + answers] for first in range(0, len(records), answers)]


class ChoiceChunks:
    """The chunks of one choice."""

    def __init__(
        self, chunks: CompletionStream, index: int, request: Request, record: GenerationRecord, prompt: str
    ) -> None:
        body = chunks.body
        self._chunks = chunks
        self._send = chunks.stream.send
        self._head = chunks.head(index)
        self._request = request
        self._record = record
        self._before = prompt if body.echo else ""
        """What is still to be said before the first new text."""
        tops = body.logprobs
        self._columns = None if tops is None else LogprobColumns(chunks.tokenizer, tops=tops)
        self._plain = self._columns is None and not chunks.running_usage and not chunks.hidden
        self._count = 0

    def on_piece(self, piece: Piece) -> None:
        # The hot path of completions: formatted by hand, and only the text is escaped.
        self._count += 1
        if piece.ending is None and self._plain and not self._before:
            if piece.delta:
                self._send(
                    b'%b%b,"logprobs":null,"finish_reason":null}],"usage":null}\n\n'
                    % (self._head, orjson.dumps(piece.delta))
                )
            return
        self._send_whole(piece)

    def on_prompt_logprobs(self, logprobs: Sequence[LogprobJson], tops: Sequence[Sequence[TopToken]]) -> None:
        if self._columns is not None:
            self._columns.add_prompt(self._request.prompt, logprobs, tops)

    def on_failure(self, error: ServingError) -> None:
        self._record.failed(error)
        self._chunks.stream.fail(error)

    def _send_whole(self, piece: Piece) -> None:
        """A chunk with everything that may be in one."""
        hidden = self._chunks.hidden
        if self._columns is not None and not hidden:
            self._columns.add((piece,))
        text, self._before = self._before + ("" if hidden else piece.delta), ""
        ending, chunk = piece.ending, b""
        if text or ending is not None or self._columns is not None:
            finish = None
            if ending is not None:
                finish = "length" if ending.reason is FinishReason.LENGTH else "stop"
            usage = b"null"
            if self._chunks.running_usage:
                generated = 0 if hidden else self._count
                usage = usage_json(len(self._request.prompt), generated, self._record.cached_tokens)
            chunk = b'%b%b,"logprobs":%b,"finish_reason":%b}],"usage":%b}\n\n' % (
                self._head,
                orjson.dumps(text),
                orjson.dumps(None if self._columns is None else self._columns.take()),
                orjson.dumps(finish),
                usage,
            )
        if ending is not None:
            self._record.ending = ending
            chunk += self._chunks.ended(ending.generated_tokens)
        if chunk:
            self._send(chunk)
        if ending is not None:
            self._chunks.close()
