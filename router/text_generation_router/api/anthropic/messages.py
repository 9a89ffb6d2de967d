"""Anthropic's Messages API: POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from dataclasses import replace

from aiohttp import web

from text_generation_router.api.anthropic.events import MessageScript, TokenCount
from text_generation_router.api.anthropic.input import to_conversation, to_options
from text_generation_router.api.anthropic.schemas import CountTokensBody, MessagesBody
from text_generation_router.api.core.blocks import CachedTokens
from text_generation_router.api.core.chat import ChatPreparer, ChatRequest
from text_generation_router.api.core.ids import named
from text_generation_router.api.core.one_answer import answer
from text_generation_router.api.core.parameters import GenerationOptions
from text_generation_router.api.core.serving import Serving
from text_generation_router.api.http.bodies import beside, json_response, parse_body
from text_generation_router.api.http.tenant import tenant_of
from text_generation_router.chat.conversation import Conversation


class MessagesRoutes:
    """Handlers of Anthropic's Messages API."""

    def __init__(self, serving: Serving, chats: ChatPreparer) -> None:
        self._serving = serving
        self._chats = chats

    async def create_message(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/messages: answer a conversation, whole or in events.

        With `stream` the data of each event is a `MessageEvent`.
        """
        body = await parse_body(request, MessagesBody)
        adapter = self._serving.adapter_of(body.model)

        def script(chat: ChatRequest, cached_tokens: CachedTokens) -> MessageScript:
            head = named("msg_", body.model, self._serving.settings)
            return MessageScript(head, chat.prompt_tokens, cached_tokens)

        def read() -> tuple[Conversation, GenerationOptions]:
            return to_conversation(body), replace(to_options(body), adapter=adapter)

        return await answer(request, self._serving, self._chats, read, script, fields=body, stream=bool(body.stream))

    async def count_message_tokens(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/messages/count_tokens: count the prompt tokens of a conversation.

        Tools and the chat template are counted, too. Nothing is generated.
        """
        tenant = tenant_of(request)
        body = await parse_body(request, CountTokensBody)
        self._serving.adapter_of(body.model)
        prompt = await self._chats.prompt(await beside(request, lambda: to_conversation(body)), tenant)
        ids = await self._serving.tokenizer_pool.encode_ids(prompt, add_special_tokens=False, tenant=tenant)
        count: TokenCount = {"input_tokens": len(ids)}
        return json_response(count)
