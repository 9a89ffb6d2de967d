"""POST /v1/chat/completions and /chat_tokenize. A streamed chat is exact to the byte.

Every delta has the role: some of TGI's clients need it. The last chunk of a choice has the finish reason. After every
choice has ended follow the usage, if requested, and [DONE].
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import orjson
from aiohttp import web

from text_generation_router.api.core.chat import AnswerEnd, ChatPreparer, ChatRequest, ParsedAnswer, Reader, finish_of
from text_generation_router.api.core.ids import Named, named, new_call_id
from text_generation_router.api.core.serving import MAX_LOGPROBS, Collector, Serving, paced
from text_generation_router.api.core.tokens import answer_tokens
from text_generation_router.api.http.caller import QosFields
from text_generation_router.api.http.dialects import openai_error_event
from text_generation_router.api.http.keys import tenant_of
from text_generation_router.api.http.record import GenerationRecord, compute_time_header, timing_headers
from text_generation_router.api.openai import answers
from text_generation_router.api.openai.choices import ChoiceSink, ChoicesStream
from text_generation_router.api.openai.input import asked_grammar, chat_options, to_conversation
from text_generation_router.api.openai.schemas import ChatBody, ChatTokenizeBody
from text_generation_router.chat.events import Event, Kind
from text_generation_router.generation import Sink, TokenOutput
from text_generation_router.request import LogprobJson, QualityOfService, TokenId
from text_generation_router.text.tokenizer import Tokenizer
from text_generation_router.web.bodies import beside, json_parts_response, parse_body
from text_generation_router.web.body_errors import about
from text_generation_router.web.sse import EventStream

STREAM_HELPER = "x-stainless-helper-method"
"""Header of the helpers of OpenAI's Python client. Its stream helper joins the roles of all deltas to one text."""


class ChatRoutes:
    def __init__(self, serving: Serving, chats: ChatPreparer) -> None:
        self._serving = serving
        self._chats = chats

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/chat/completions: answer a conversation, whole or in chunks.

        With `stream` the data of each event is a `ChatChunk`, and `[DONE]` ends the stream.
        """
        return await self.answer(request, await parse_body(request, ChatBody))

    async def answer(self, request: web.Request, body: ChatBody) -> web.StreamResponse:
        """Answer a body that another route parsed."""
        count = body.n or 1
        records = self._serving.start(request, count)
        async with self._serving.take_permits(records, count, body):
            chat = await self._prepare(request, body, self._serving.qos(records[0], body), count)
            if body.stream:
                return await self._streamed(request, body, chat, records)
            most = MAX_LOGPROBS if body.logprobs else 0
            with about("messages"):
                collectors = await self._serving.collect(chat.requests, records, most_logprobs=most)
            headers = self._serving.cost_headers(len(chat.prompt))
            headers |= timing_headers(records) | compute_time_header(records[0])
            reply = await self._whole(body, chat, collectors, records)
        return await json_parts_response(request, reply, headers)

    async def text(self, request: web.Request, body: ChatBody, record: GenerationRecord, around: QosFields) -> str:
        """Return the text of one answer; `around` is the body of several chats that this is one of."""
        chat = await self._prepare(request, body, self._serving.qos(record, body, around), 1)
        [collector] = await self._serving.collect(chat.requests, [record], most_logprobs=0)
        ending = collector.ended.result()
        # The reply has no field for calls: with tools the text is as the model wrote it.
        return ending.text if chat.form.tools else (await chat.answer(ending)).text

    async def chat_tokenize(self, request: web.Request) -> web.StreamResponse:
        """POST /chat_tokenize: return the prompt text of a conversation and its tokens.

        The body is that of `/v1/chat/completions`. Nothing is generated.
        """
        tenant = tenant_of(request)
        body = await parse_body(request, ChatTokenizeBody)
        self._serving.adapter_of(body.model, body.lora_name)
        text = await self._chats.prompt(await beside(request, lambda: to_conversation(body, None)), tenant)
        pool = self._serving.tokenizer_pool
        encoding = await pool.encode(text, add_special_tokens=False, tenant=tenant)
        after = b',"templated_text":%b}' % orjson.dumps(text)
        return await answer_tokens(request, text, encoding, pool.slices, before=b'{"tokenize_response":', after=after)

    async def _prepare(self, request: web.Request, body: ChatBody, qos: QualityOfService, count: int) -> ChatRequest:
        body.check_best_of()
        await self._serving.load_named(request, body.lora_name, body.lora_path)
        adapter = self._serving.adapter_of(body.model, body.lora_name)
        conversation = await beside(request, lambda: to_conversation(body, asked_grammar(body)))
        return await self._chats.prepare(conversation, replace(chat_options(body), adapter=adapter), qos, count)

    async def _streamed(
        self, request: web.Request, body: ChatBody, chat: ChatRequest, records: Sequence[GenerationRecord]
    ) -> web.StreamResponse:
        serving = self._serving
        stream = serving.stream(request, serving.cost_headers(len(chat.prompt)), openai_error_event)
        head, role_once = named("chatcmpl-", body.model, serving.settings), STREAM_HELPER in request.headers
        chunks = ChatStream(stream, head, body, chat, records, serving.tokenizer, role_once=role_once)
        with about("messages"), serving.run(chat.requests, records, chunks.sinks()):
            return await stream.run()

    async def _whole(
        self, body: ChatBody, chat: ChatRequest, collectors: Sequence[Collector], records: Sequence[GenerationRecord]
    ) -> AsyncIterator[bytes]:
        generated = sum(collector.ended.result().generated_tokens for collector in collectors)
        predicted = body.prediction is not None
        counts = answers.chat_usage(chat.prompt_tokens, generated, 0, records, predicted=predicted)

        async def choices() -> AsyncIterator[answers.ChatChoice]:
            for index, collector in enumerate(collectors):
                answer = await chat.answer(collector.ended.result())
                counts["completion_tokens_details"]["reasoning_tokens"] += answer.reasoning_tokens
                yield await self._choice(index, body, answer, collector)

        head = named("chatcmpl-", body.model, self._serving.settings)
        scores = None
        if body.prompt_logprobs is not None:
            scores = await answers.written_prompt_scores(collectors[0], self._serving.tokenizer, body.prompt_logprobs)
        return answers.whole_answer(head, "chat.completion", choices(), counts, scores)

    async def _choice(
        self, index: int, body: ChatBody, answer: ParsedAnswer, collector: Collector
    ) -> answers.ChatChoice:
        message: answers.AssistantMessage = {
            "role": "assistant",
            "content": answer.text or (None if answer.calls else ""),
            "refusal": None,
        }
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if answer.calls and body.functions:
            message["function_call"] = {"name": answer.calls[0].name, "arguments": answer.calls[0].arguments}
        elif answer.calls:
            message["tool_calls"] = [
                {"id": new_call_id(), "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in answer.calls
            ]
        logprobs: answers.ChatLogprobs | None = None
        if body.logprobs:
            tops = collector.request.logprobs.top_n
            logprobs = {"content": [], "refusal": None}
            async for output in paced(collector.take_outputs()):
                logprobs["content"] += answers.content_logprobs((output,), self._serving.tokenizer, tops)["content"]
        return {
            "index": index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": answers.chat_finish(answer.finish, functions=bool(body.functions)),
        }


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
        self.role: answers.Delta = {} if role_once else {"role": "assistant"}
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

    def logprobs(self, outputs: Sequence[TokenOutput]) -> answers.ChatLogprobs:
        return answers.content_logprobs(outputs, self._tokenizer, self._chat.requests[0].logprobs.top_n)

    def usage(self, generated: int, reasoning: int | None) -> answers.Usage:
        tokens = self._chat.prompt_tokens
        return answers.chat_usage(tokens, generated, reasoning, self._records, predicted=self._predicted)


class ChatChoiceStream(ChoiceSink):
    """The sink of one choice: of outputs without a parser, of a parser's events with one."""

    __slots__ = ("_chat", "_count", "_first", "_plain", "_text_head", "_unscored")

    def __init__(self, chat: ChatStream, index: int, record: GenerationRecord) -> None:
        super().__init__(chat, index, record)
        self._chat = chat
        self._text_head = self._head + orjson.dumps(chat.role | {"content": ""}).removesuffix(b'""}')
        """A chunk of text, up to the text."""
        self._plain = not (chat.scored or chat.running_usage)
        self._count = 0
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
        delta: answers.Delta = {"content": output.delta}
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

    def _end(self, delta: answers.Delta, end: AnswerEnd) -> None:
        chunk = self._opening() + self._chunk(delta, answers.chat_finish(end.finish, functions=self._chat.functions))
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

    def _delta(self, event: Event) -> answers.Delta:
        kind, text, index = event
        if kind is Kind.TEXT:
            return {"content": text}
        if kind is Kind.REASONING:
            return {"reasoning_content": text}
        begins = kind is Kind.CALL
        function: answers.FunctionDelta = {"name": text, "arguments": ""} if begins else {"arguments": text}
        if self._chat.functions:
            return {"function_call": function}
        if begins:
            return {"tool_calls": [{"index": index, "id": new_call_id(), "type": "function", "function": function}]}
        return {"tool_calls": [{"index": index, "function": function}]}

    def _chunk(self, delta: answers.Delta, finish: answers.ChatFinish | None = None) -> bytes:
        unscored, self._unscored = self._unscored, []
        return b'%b%b,"logprobs":%b,"finish_reason":%b}],"usage":%b}\n\n' % (
            self._head,
            orjson.dumps({**self._chat.role, **delta}),
            orjson.dumps(self._chat.logprobs(unscored) if unscored else None),
            orjson.dumps(finish),
            self._usage(self._count),
        )
