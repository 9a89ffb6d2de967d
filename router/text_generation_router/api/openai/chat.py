"""POST /v1/chat/completions and /chat_tokenize."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import orjson
from aiohttp import web

from text_generation_router.api.core.chat import ChatPreparer, ChatRequest, ParsedAnswer
from text_generation_router.api.core.ids import named, new_call_id
from text_generation_router.api.core.serving import MAX_LOGPROBS, Collector, Serving, paced
from text_generation_router.api.core.tokens import answer_tokens
from text_generation_router.api.http.caller import QosFields
from text_generation_router.api.http.dialects import openai_error_event
from text_generation_router.api.http.keys import tenant_of
from text_generation_router.api.http.record import GenerationRecord, compute_time_header, timing_headers
from text_generation_router.api.openai.answers import (
    AssistantMessage,
    ChatChoice,
    ChatLogprobs,
    chat_finish,
    chat_usage,
    content_logprobs,
    whole_answer,
    written_prompt_scores,
)
from text_generation_router.api.openai.chat_chunks import ChatStream
from text_generation_router.api.openai.input import asked_grammar, chat_options, to_conversation
from text_generation_router.api.openai.schemas import ChatBody, ChatTokenizeBody
from text_generation_router.request import QualityOfService
from text_generation_router.web.bodies import beside, json_parts_response, parse_body

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
            collectors = await self._serving.collect(
                chat.requests, records, most_logprobs=MAX_LOGPROBS if body.logprobs else 0
            )
            headers = (
                self._serving.cost_headers(len(chat.prompt)) | timing_headers(records) | compute_time_header(records[0])
            )
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
        with serving.run(chat.requests, records, chunks.sinks()):
            return await stream.run()

    async def _whole(
        self, body: ChatBody, chat: ChatRequest, collectors: Sequence[Collector], records: Sequence[GenerationRecord]
    ) -> AsyncIterator[bytes]:
        generated = sum(collector.ended.result().generated_tokens for collector in collectors)
        predicted = body.prediction is not None
        counts = chat_usage(chat.prompt_tokens, generated, 0, records, predicted=predicted)

        async def choices() -> AsyncIterator[ChatChoice]:
            for index, collector in enumerate(collectors):
                answer = await chat.answer(collector.ended.result())
                counts["completion_tokens_details"]["reasoning_tokens"] += answer.reasoning_tokens
                yield await self._choice(index, body, answer, collector)

        head = named("chatcmpl-", body.model, self._serving.settings)
        scores = None
        if body.prompt_logprobs is not None:
            scores = await written_prompt_scores(collectors[0], self._serving.tokenizer, body.prompt_logprobs)
        return whole_answer(head, "chat.completion", choices(), counts, scores)

    async def _choice(self, index: int, body: ChatBody, answer: ParsedAnswer, collector: Collector) -> ChatChoice:
        message: AssistantMessage = {
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
        logprobs: ChatLogprobs | None = None
        if body.logprobs:
            tops = collector.request.logprobs.top_n
            logprobs = {"content": [], "refusal": None}
            async for output in paced(collector.take_outputs()):
                logprobs["content"] += content_logprobs((output,), self._serving.tokenizer, tops)["content"]
        return {
            "index": index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": chat_finish(answer.finish, functions=bool(body.functions)),
        }
