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
from text_generation_router.api.http.fields import WrittenLogprob
from text_generation_router.api.http.record import GenerationRecord, cached_tokens_of_prompts
from text_generation_router.api.openai.answers import CompletionFinish, CompletionLogprobs, Usage, alternative, usage
from text_generation_router.api.openai.choices import ChoiceSink, ChoicesStream
from text_generation_router.api.openai.schemas import CompletionBody
from text_generation_router.generation import Sink, TokenOutput
from text_generation_router.request import LogprobJson, Request, TokenId, TopToken
from text_generation_router.text.tokenizer import Tokenizer
from text_generation_router.web.bodies import compact_json
from text_generation_router.web.sse import EventStream


class CompletionStream(ChoicesStream):
    def __init__(
        self,
        stream: EventStream,
        named: Named,
        body: CompletionBody,
        prompts: Sequence[str],
        tokenizer: Tokenizer,
        requests: Sequence[Request],
        records: Sequence[GenerationRecord],
    ) -> None:
        super().__init__(stream, named.head("text_completion"), body, records, b"text")
        self.body = body
        self.tokenizer = tokenizer
        self.hidden = body.max_tokens == 0
        self._prompts = prompts
        self._requests = requests
        self._each = len(requests) // len(prompts)

    def sinks(self) -> list[Sink]:
        """The sink of each choice; the choices of a prompt are adjacent."""
        return [
            CompletionChoiceStream(self, index, request, record, self._prompts[index // self._each])
            for index, (request, record) in enumerate(zip(self._requests, self._records, strict=True))
        ]

    def usage(self, generated: int, reasoning: int) -> Usage:
        prompt_tokens = sum(len(request.prompt) for request in self._requests[:: self._each])
        return usage(prompt_tokens, 0 if self.hidden else generated, cached_tokens_of_prompts(self._records))


class CompletionChoiceStream(ChoiceSink):
    __slots__ = ("_before", "_chunks", "_columns", "_plain", "_request")

    def __init__(
        self, chunks: CompletionStream, index: int, request: Request, record: GenerationRecord, prompt: str
    ) -> None:
        super().__init__(chunks, index, record)
        body = chunks.body
        self._chunks = chunks
        self._request = request
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
            self._send_last(chunk, ending, counts=not echo)
        elif chunk:
            self._stream.send(chunk, counts=not echo)


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
        self._top.append(orjson.Fragment(compact_json(alternatives)))

    def copy(self) -> LogprobColumns:
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
