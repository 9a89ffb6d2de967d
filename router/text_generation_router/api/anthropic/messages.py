"""Anthropic's Messages API: POST /v1/messages and /v1/messages/count_tokens."""

from aiohttp import web

from text_generation_router.api.anthropic.events import MessageWriter, TokenCount
from text_generation_router.api.anthropic.input import to_conversation, to_options
from text_generation_router.api.anthropic.schemas import CountTokensBody, MessagesBody
from text_generation_router.api.core.chat import ChatRequest
from text_generation_router.api.core.ids import named
from text_generation_router.api.core.one_answer import AnswerRoutes, CachedTokens
from text_generation_router.api.core.parameters import GenerationOptions
from text_generation_router.api.http.keys import tenant_of
from text_generation_router.chat.conversation import Conversation
from text_generation_router.web.bodies import beside, json_response, parse_body


class MessagesRoutes(AnswerRoutes):
    async def create_message(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/messages: answer a conversation, whole or in events.

        With `stream` the data of each event is a `MessageEvent`.
        """
        body = await parse_body(request, MessagesBody)

        def writer(chat: ChatRequest, cached_tokens: CachedTokens) -> MessageWriter:
            head = named("msg_", body.model, self._serving.settings)
            return MessageWriter(head, chat.prompt_tokens, cached_tokens)

        def read() -> tuple[Conversation, GenerationOptions]:
            return to_conversation(body), to_options(body)

        return await self._answer(request, body, read, writer)

    async def count_message_tokens(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/messages/count_tokens: count the prompt tokens of a conversation.

        Tools and the chat template are counted, too. Nothing is generated.
        """
        tenant = tenant_of(request)
        body = await parse_body(request, CountTokensBody)
        self._serving.adapter_of(body.model)
        conversation = await beside(request, lambda: to_conversation(body))
        count: TokenCount = {"input_tokens": await self._chats.count_tokens(conversation, tenant)}
        return json_response(count)
