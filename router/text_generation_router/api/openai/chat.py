"""POST /v1/chat/completions and /chat_tokenize."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson
from aiohttp import web

from text_generation_router.api.core.collector import Collector
from text_generation_router.api.core.serving import Serving
from text_generation_router.api.core.turns import Answer, Turn, Turns
from text_generation_router.api.http.bodies import parse_body
from text_generation_router.api.http.dialects import openai_error_event
from text_generation_router.api.http.record import GenerationRecord
from text_generation_router.api.openai.chat_chunks import ChatStream, Shown
from text_generation_router.api.openai.chat_logprobs import content_logprobs
from text_generation_router.api.openai.chat_messages import to_conversation
from text_generation_router.api.openai.ids import named, new_call_id
from text_generation_router.api.openai.parameters import chat_parameters, extras
from text_generation_router.api.openai.schemas import ChatBody, ChatTokenizeBody, StreamOptions
from text_generation_router.api.openai.usage import usage
from text_generation_router.api.tgi.headers import compute_time_header, cost_headers, timing_headers
from text_generation_router.api.tgi.service import tokens_json
from text_generation_router.grammar.forms import response_format
from text_generation_router.request import Grammar

Json = dict[str, Any]


class ChatRoutes:
    """Handlers of chats in OpenAI's dialect."""

    def __init__(self, serving: Serving, turns: Turns) -> None:
        self._serving = serving
        self._turns = turns

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/chat/completions: an answer to a conversation, whole or in chunks."""
        return await self.answer(request, await parse_body(request, ChatBody))

    async def answer(self, request: web.Request, body: ChatBody) -> web.StreamResponse:
        """The same for a body that came another way."""
        count = body.n or 1
        records = self._serving.start(request, count)
        with self._serving.permits.take(count):
            turn = await self._prepare(body, count)
            if body.stream:
                return await self._streamed(request, body, turn, records)
            collectors = await self._serving.collect(turn.requests, records)
            settings = self._serving.settings
            headers = (
                cost_headers(settings, len(turn.prompt)) | timing_headers(records) | compute_time_header(records[0])
            )
            reply = self._whole(body, turn, collectors)
            return web.Response(body=orjson.dumps(reply), content_type="application/json", headers=headers)

    async def text(self, body: ChatBody, records: Sequence[GenerationRecord]) -> str:
        """The text of one answer, for routes that want nothing else."""
        turn = await self._prepare(body, 1)
        [collector] = await self._serving.collect(turn.requests, records)
        return collector.ended.result().text

    async def tokenize(self, request: web.Request) -> web.StreamResponse:
        """POST /chat_tokenize: the templated text of a conversation, and its tokens."""
        text = await self._turns.prompt(to_conversation(await parse_body(request, ChatTokenizeBody), None))
        encoding = await self._serving.tokenizer.encode(text, add_special_tokens=False)
        tokens = b"".join(tokens_json(text, encoding))
        body = b'{"tokenize_response":%b,"templated_text":%b}' % (tokens, orjson.dumps(text))
        return web.Response(body=body, content_type="application/json")

    async def _prepare(self, body: ChatBody, count: int) -> Turn:
        conversation = to_conversation(body, _grammar(body))
        return await self._turns.prepare(conversation, chat_parameters(body), extras(body), count)

    async def _streamed(
        self, request: web.Request, body: ChatBody, turn: Turn, records: Sequence[GenerationRecord]
    ) -> web.StreamResponse:
        serving = self._serving
        stream = serving.stream(request, cost_headers(serving.settings, len(turn.prompt)), openai_error_event)
        options = body.stream_options or StreamOptions()
        shown = Shown(
            logprobs=bool(body.logprobs),
            usage=bool(options.include_usage),
            running_usage=bool(options.continuous_usage_stats),
        )
        chat = ChatStream(stream, named("chatcmpl-", body.model, serving.settings), turn, serving.tokenizer, shown)
        with serving.run(turn.requests, records, chat.sinks(records)):
            return await stream.run()

    def _whole(self, body: ChatBody, turn: Turn, collectors: Sequence[Collector]) -> Json:
        head = named("chatcmpl-", body.model, self._serving.settings)
        generated = sum(collector.ended.result().generated_tokens for collector in collectors)
        return {
            "id": head.id,
            "object": "chat.completion",
            "created": head.created,
            "model": head.model,
            "system_fingerprint": head.fingerprint,
            "choices": [
                self._choice(index, body, turn.answer(collector.ended.result()), collector)
                for index, collector in enumerate(collectors)
            ],
            "usage": usage(turn.prompt_tokens, generated),
        }

    def _choice(self, index: int, body: ChatBody, answer: Answer, collector: Collector) -> Json:
        message: Json = {"role": "assistant", "content": answer.text or (None if answer.calls else "")}
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if answer.calls:
            message["tool_calls"] = [
                {"id": new_call_id(), "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in answer.calls
            ]
        return {
            "index": index,
            "message": message,
            "logprobs": content_logprobs(collector.pieces, self._serving.tokenizer) if body.logprobs else None,
            "finish_reason": answer.finish.value,
        }


def _grammar(body: ChatBody) -> Grammar | None:
    return None if body.response_format is None else response_format(body.response_format)
