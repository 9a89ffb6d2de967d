"""Writers of a streamed completion: CompletionAnswer events, exact to the byte.

One chunk per token, the choices interleaved, then the usage, if requested, and [DONE].
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import cast

import orjson

from text_generation_proto.values import FinishReason
from text_generation_router.api.core.ids import Named
from text_generation_router.api.core.serving import TOKENS_AT_ONCE
from text_generation_router.api.http.bodies import WrittenLogprob
from text_generation_router.api.http.dialects import DONE
from text_generation_router.api.http.record import GenerationRecord, cached_tokens
from text_generation_router.api.http.sse import EventStream
from text_generation_router.api.openai.answers import CompletionFinish, CompletionLogprobs, alternative, usage
from text_generation_router.api.openai.schemas import CompletionBody, StreamOptions
from text_generation_router.errors import ServingError
from text_generation_router.generation import Sink, TokenOutput
from text_generation_router.request import LogprobJson, Request, TokenId, TopToken
from text_generation_router.text.tokenizer import Tokenizer


class CompletionStream:
    """The stream of one request, with all its choices."""

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
        """The sink of each choice; the choices of a prompt are adjacent."""
        self._open = len(requests)
        each = len(requests) // len(self._prompts)
        self._prompt_tokens = sum(len(request.prompt) for request in requests[::each])
        self._records = by_prompt(records, len(self._prompts))
        return [
            CompletionChoiceStream(self, index, request, record, self._prompts[index // each])
            for index, (request, record) in enumerate(zip(requests, records, strict=True))
        ]

    def head(self, index: int) -> bytes:
        """The start of a chunk, up to its text."""
        return b'data: %b,"choices":[{"index":%d,"text":' % (self._head, index)

    def ended(self, generated: int) -> bytes:
        """Count the end of a choice; return the events that follow the last one."""
        self._open -= 1
        self._generated += 0 if self.hidden else generated
        if self._open:
            return b""
        if not self._usage:
            return DONE
        counts = orjson.dumps(usage(self._prompt_tokens, self._generated, sum(map(cached_tokens, self._records))))
        return b'data: %b,"choices":[],"usage":%b}\n\n%b' % (self._head, counts, DONE)

    def close(self) -> None:
        """Close the stream if every choice has ended."""
        if not self._open:
            self.stream.close()


def by_prompt(records: Sequence[GenerationRecord], prompts: int) -> list[Sequence[GenerationRecord]]:
    """Split the generations by prompt: the same number for each, in order."""
    each = len(records) // prompts
    return [records[first : first + each] for first in range(0, len(records), each)]


class CompletionChoiceStream(Sink):
    """The sink of one choice."""

    __slots__ = ("_before", "_chunks", "_columns", "_head", "_plain", "_record", "_request", "_stream")

    def __init__(
        self, chunks: CompletionStream, index: int, request: Request, record: GenerationRecord, prompt: str
    ) -> None:
        body = chunks.body
        self._chunks = chunks
        self._stream = chunks.stream
        self._head = chunks.head(index)
        self._request = request
        self._record = record
        self._before = prompt if body.echo else ""
        """Text to send before the first new text."""
        tops = body.logprobs
        self._columns = None if tops is None else LogprobColumns(chunks.tokenizer, tops=tops)
        self._plain = self._columns is None and not chunks.running_usage and not chunks.hidden

    def on_text(self, number: int, token_id: TokenId, text: str, logprob: LogprobJson) -> None:
        # The hot path of completions: a CompletionAnswer formatted by hand, in which only the text is escaped.
        if not self._plain or self._before:
            super().on_text(number, token_id, text, logprob)
        elif text:
            self._stream.send(
                b'%b%b,"logprobs":null,"finish_reason":null}],"usage":null}\n\n' % (self._head, orjson.dumps(text))
            )

    def on_prompt_logprobs(self, logprobs: Sequence[LogprobJson], tops: Iterable[Sequence[TopToken]]) -> None:
        if self._columns is not None:
            for _ in self._columns.add_prompt(self._request.prompt, logprobs, tops):
                pass

    def on_failure(self, error: ServingError) -> None:
        self._record.failed(error)
        self._chunks.stream.fail(error)

    def on_output(self, output: TokenOutput) -> None:
        hidden = self._chunks.hidden
        if self._columns is not None and not hidden:
            self._columns.add(output)
        echo = bool(self._before)
        text, self._before = self._before + ("" if hidden else output.delta), ""
        ending, chunk = output.ending, b""
        if text or ending is not None or self._columns is not None:
            finish: CompletionFinish | None = None
            if ending is not None:
                finish = "length" if ending.reason is FinishReason.LENGTH else "stop"
            counts = b"null"
            if self._chunks.running_usage:
                generated = 0 if hidden else output.number
                counts = orjson.dumps(usage(len(self._request.prompt), generated, self._record.cached_tokens))
            chunk = b'%b%b,"logprobs":%b,"finish_reason":%b}],"usage":%b}\n\n' % (
                self._head,
                orjson.dumps(text),
                orjson.dumps(None if self._columns is None else self._columns.take()),
                orjson.dumps(finish),
                counts,
            )
        if ending is not None:
            self._record.ending = ending
            chunk += self._chunks.ended(ending.generated_tokens)
        if chunk:
            self._stream.send(chunk, counts=not echo)
        if ending is not None:
            self._chunks.close()


class LogprobColumns:
    """The `logprobs` of a completion: columns over its tokens. Offsets count characters from the start of the text."""

    def __init__(self, tokenizer: Tokenizer, *, tops: int) -> None:
        self._tokenizer = tokenizer
        self._tops = tops
        self._offset = 0
        self._tokens: list[str] = []
        self._logprobs: list[orjson.Fragment | None] = []
        self._top: list[orjson.Fragment | None] = []
        """Written: as objects they take ten times as much."""
        self._offsets: list[int] = []

    def add_prompt(
        self, ids: Sequence[TokenId], logprobs: Sequence[LogprobJson], tops: Iterable[Sequence[TopToken]]
    ) -> Iterator[None]:
        """Add the tokens of the prompt, with pauses; the first has no log-probability."""
        for at, (token_id, logprob, top) in enumerate(zip_longest(ids, logprobs, tops)):
            self._add(token_id, None if at == 0 or logprob == b"null" else logprob, top or ())
            if at % TOKENS_AT_ONCE == 0:
                yield

    def add(self, output: TokenOutput) -> None:
        """Add a new token."""
        self._add(output.token_id, output.logprob, output.top)

    def _add(self, token_id: TokenId, logprob: LogprobJson | None, top: Sequence[TopToken]) -> None:
        text = self._tokenizer.token_text(token_id)
        self._tokens.append(text)
        self._offsets.append(self._offset)
        self._offset += len(text)
        if logprob is None:
            self._logprobs.append(None)
            self._top.append(None)
            return
        chosen = orjson.Fragment(logprob)
        self._logprobs.append(chosen)
        alternatives = {self._tokenizer.token_text(other): alternative(score) for other, score in top[: self._tops]}
        # OpenAI always lists the generated token.
        alternatives.setdefault(text, chosen)
        self._top.append(orjson.Fragment(orjson.dumps(alternatives)))

    def copy(self) -> LogprobColumns:
        """An independent copy."""
        twin = LogprobColumns(self._tokenizer, tops=self._tops)
        twin._offset = self._offset
        twin._tokens, twin._logprobs = list(self._tokens), list(self._logprobs)
        twin._top, twin._offsets = list(self._top), list(self._offsets)
        return twin

    def take(self) -> CompletionLogprobs:
        """Return and remove the columns added since the last call."""
        columns: CompletionLogprobs = {
            "tokens": self._tokens,
            "token_logprobs": self._logprobs,
            "top_logprobs": cast("list[dict[str, WrittenLogprob] | None]", self._top),
            "text_offset": self._offsets,
        }
        self._tokens, self._logprobs, self._top, self._offsets = [], [], [], []
        return columns
