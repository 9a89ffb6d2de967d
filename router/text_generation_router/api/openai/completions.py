"""POST /v1/completions: prompts as texts or token ids, each with one or several answers.

A stream is exact to the byte: one chunk per token, the choices interleaved, then the usage, if requested, and [DONE].
"""

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, zip_longest
from typing import cast

import orjson
from aiohttp import web

from text_generation_proto.values import FinishReason
from text_generation_router.api.core.ids import Named, named
from text_generation_router.api.core.parameters import GenerationOptions
from text_generation_router.api.core.serving import MAX_LOGPROBS, TOKENS_AT_ONCE, Collector, Serving, paced
from text_generation_router.api.http.dialects import openai_error_event
from text_generation_router.api.http.fields import WrittenLogprob
from text_generation_router.api.http.record import GenerationRecord, cached_tokens_of_prompts, timing_headers
from text_generation_router.api.openai import answers
from text_generation_router.api.openai.choices import ChoiceSink, ChoicesStream
from text_generation_router.api.openai.input import completion_options
from text_generation_router.api.openai.schemas import CompletionBody
from text_generation_router.errors import BatchTooLarge, InvalidRequest, SuffixNotSupported
from text_generation_router.generation import Sink, TokenOutput
from text_generation_router.request import LogprobJson, QualityOfService, Request, TokenId, TopToken
from text_generation_router.text.tokenizer import Tokenizer
from text_generation_router.web.bodies import compact_json, json_parts_response, parse_body
from text_generation_router.web.sse import EventStream

MAX_ECHOED = 1 << 22
"""Characters of prompts that `echo` repeats in all answers."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One admitted prompt."""

    text: str
    """The text, for `echo` and for the count of characters; empty for token ids without `echo`."""
    requests: Sequence[Request]
    """One request per answer."""


class CompletionRoutes:
    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/completions: continue prompts, whole or in chunks.

        Several prompts have their answers one after the other in `choices`. With `stream` the data of each event is a
        `CompletionAnswer`, and `[DONE]` ends the stream.
        """
        return await self.answer(request, await parse_body(request, CompletionBody))

    async def answer(self, request: web.Request, body: CompletionBody) -> web.StreamResponse:
        """Answer a body that another route parsed."""
        prompts = _prompts(body)
        records = self._serving.start(request, min(len(prompts), self._limit) * (body.n or 1))
        await self._serving.load_named(request, body.lora_name, body.lora_path)
        self._check(body, prompts)
        async with self._serving.take_permits(records, len(records), body):
            qos = self._serving.qos(records[0], body)
            options = replace(completion_options(body), adapter=self._serving.adapter_of(body.model, body.lora_name))
            if len(prompts) > 1:
                options = await self._serving.preparer.with_bad_words(options, qos.tenant)
            admitted = [await self._admit(body, prompt, options, qos) for prompt in prompts]
            if body.echo and (echoed := (body.n or 1) * sum(len(prompt.text) for prompt in admitted)) > MAX_ECHOED:
                raise InvalidRequest(f"`n` times the characters must be <= {MAX_ECHOED} with `echo`. Given: {echoed}")
            requests = [request for prompt in admitted for request in prompt.requests]
            headers = self._serving.cost_headers(sum(len(prompt.text) for prompt in admitted))
            if body.stream:
                stream = self._serving.stream(request, headers, openai_error_event)
                head = named("cmpl-", body.model, self._serving.settings)
                texts = [prompt.text for prompt in admitted]
                chunks = CompletionStream(stream, head, body, texts, self._serving.tokenizer, requests, records)
                with self._serving.run(requests, records, chunks.sinks()):
                    return await stream.run()
            collectors = await self._serving.collect(
                requests, records, most_logprobs=0 if body.logprobs is None else MAX_LOGPROBS
            )
            cached = cached_tokens_of_prompts(records)
            reply = self._whole(body, admitted, collectors, cached)
            headers |= timing_headers(records)
        return await json_parts_response(request, reply, headers)

    @property
    def _limit(self) -> int:
        return self._serving.settings.config.max_client_batch_size

    def _check(self, body: CompletionBody, prompts: Sequence[object]) -> None:
        """Check what concerns all prompts. Raises ServingError."""
        self._serving.adapter_of(body.model, body.lora_name)
        if body.suffix is not None:
            raise SuffixNotSupported
        if not prompts:
            raise InvalidRequest("Empty array detected. Do not use an empty array for the prompt.", param="prompt")
        if len(prompts) > self._limit:
            raise BatchTooLarge(str(self._limit))
        body.check_best_of()

    async def _admit(
        self, body: CompletionBody, prompt: str | Sequence[TokenId], options: GenerationOptions, qos: QualityOfService
    ) -> Prompt:
        serving = self._serving
        requests = await serving.preparer.prepare(prompt, options, qos, body.n or 1)
        if isinstance(prompt, str):
            text = prompt
        else:
            text = await serving.tokenizer_pool.decode(prompt, qos.tenant) if body.echo else ""
        if not body.stream:
            requests[1:] = [replace(request, logprobs=request.logprobs.without_prompt()) for request in requests[1:]]
        return Prompt(text, requests)

    def _whole(
        self, body: CompletionBody, prompts: Sequence[Prompt], collectors: Sequence[Collector], cached: int
    ) -> AsyncIterator[bytes]:
        hidden = body.max_tokens == 0
        generated = 0 if hidden else sum(collector.ended.result().generated_tokens for collector in collectors)
        counts = answers.usage(sum(len(prompt.requests[0].prompt) for prompt in prompts), generated, cached)
        head = named("cmpl-", body.model, self._serving.settings)
        return answers.whole_answer(head, "text_completion", self._choices(body, prompts, collectors), counts)

    async def _choices(
        self, body: CompletionBody, prompts: Sequence[Prompt], collectors: Sequence[Collector]
    ) -> AsyncIterator[answers.CompletionChoice]:
        left = iter(enumerate(collectors))
        for prompt in prompts:
            scored: LogprobColumns | None = None
            scores: orjson.Fragment | None = None
            for index, collector in islice(left, len(prompt.requests)):
                if body.prompt_logprobs is not None and scores is None:
                    scores = await answers.written_prompt_scores(
                        collector, self._serving.tokenizer, body.prompt_logprobs
                    )
                if body.logprobs is not None and scored is None:
                    # Only the first answer of a prompt brings the prompt's log-probabilities: they are the same for all.
                    scored = LogprobColumns(self._serving.tokenizer, tops=body.logprobs)
                    if body.echo:
                        ids, tops = collector.request.prompt, collector.prompt_tops
                        for _ in scored.add_prompt(ids, collector.prompt_logprobs, tops):
                            await asyncio.sleep(0)
                choice = await self._choice(index, body, prompt, collector, scored)
                if scores is not None:
                    choice["prompt_logprobs"] = scores
                yield choice

    async def _choice(
        self, index: int, body: CompletionBody, prompt: Prompt, collector: Collector, scored: "LogprobColumns | None"
    ) -> answers.CompletionChoice:
        ending = collector.ended.result()
        text = "" if body.max_tokens == 0 else ending.text
        logprobs: answers.CompletionLogprobs | None = None
        if scored is not None:
            columns = scored.copy()
            if body.max_tokens != 0:
                async for output in paced(collector.take_outputs()):
                    columns.add(output)
            logprobs = columns.take()
        return {
            "index": index,
            "text": prompt.text + text if body.echo else text,
            "logprobs": logprobs,
            "finish_reason": "length" if ending.reason is FinishReason.LENGTH else "stop",
        }


def _prompts(body: CompletionBody) -> Sequence[str | Sequence[TokenId]]:
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if prompt and isinstance(prompt[0], int):
        return [cast("Sequence[TokenId]", prompt)]
    return [text_or_ids for text_or_ids in prompt if not isinstance(text_or_ids, int)]


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

    def usage(self, generated: int, reasoning: int) -> answers.Usage:
        prompt_tokens = sum(len(request.prompt) for request in self._requests[:: self._each])
        return answers.usage(prompt_tokens, 0 if self.hidden else generated, cached_tokens_of_prompts(self._records))


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
            finish: answers.CompletionFinish | None = None
            if ending is not None:
                finish = "length" if ending.reason is FinishReason.LENGTH else "stop"
            counts = b"null"
            if self._chunks.running_usage:
                generated = 0 if hidden else output.number
                counts = orjson.dumps(answers.usage(len(self._request.prompt), generated, self._record.cached_tokens))
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
        alternatives = {
            self._tokenizer.token_text(other): answers.alternative(score) for other, score in top[: self._tops]
        }
        # OpenAI always lists the generated token.
        alternatives.setdefault(text, chosen)
        self._top.append(orjson.Fragment(compact_json(alternatives)))

    def copy(self) -> "LogprobColumns":
        twin = LogprobColumns(self._tokenizer, tops=self._tops)
        twin._offset = self._offset
        twin._tokens, twin._logprobs = list(self._tokens), list(self._logprobs)
        twin._top, twin._offsets = list(self._top), list(self._offsets)
        return twin

    def take(self) -> answers.CompletionLogprobs:
        """Return and remove the columns added since the last call."""
        columns: answers.CompletionLogprobs = {
            "tokens": self._tokens,
            "token_logprobs": self._logprobs,
            "top_logprobs": cast("list[dict[str, WrittenLogprob] | None]", self._top),
            "text_offset": self._offsets,
        }
        self._tokens, self._logprobs, self._top, self._offsets = [], [], [], []
        return columns
