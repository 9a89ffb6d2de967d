"""POST /v1/messages and /v1/messages/count_tokens, as Anthropic has them."""

from __future__ import annotations

from functools import partial

import orjson
from aiohttp import web

from text_generation_router.api.anthropic.events import MessageScript
from text_generation_router.api.anthropic.input import to_asked
from text_generation_router.api.anthropic.schemas import CountTokensBody, MessagesBody
from text_generation_router.api.core.serving import Serving
from text_generation_router.api.core.turns import ChatPreparer, ChatRequest
from text_generation_router.api.http.bodies import parse_body
from text_generation_router.api.openai.blocks import CachedTokens
from text_generation_router.api.openai.ids import named
from text_generation_router.api.openai.one_answer import answer
from text_generation_router.text.tokenizer import tokenizer_errors


class MessagesRoutes:
    """Handlers of Anthropic's Messages API."""

    def __init__(self, serving: Serving, turns: ChatPreparer) -> None:
        self._serving = serving
        self._turns = turns

    async def create(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/messages: an answer to a conversation, whole or in events."""
        body = await parse_body(request, MessagesBody)

        def script(turn: ChatRequest, cached_tokens: CachedTokens) -> MessageScript:
            head = named("msg_", body.model, self._serving.settings)
            return MessageScript(head, turn.prompt_tokens, cached_tokens)

        asked = partial(to_asked, body)
        return await answer(request, self._serving, self._turns, asked, script, fields=body, stream=bool(body.stream))

    async def count_tokens(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/messages/count_tokens: how many tokens the prompt of a conversation has."""
        body = await parse_body(request, CountTokensBody)
        prompt = await self._turns.prompt(to_asked(body).conversation)
        with tokenizer_errors():
            ids = await self._serving.tokenizer.encode_ids(prompt, add_special_tokens=False)
        return web.Response(body=orjson.dumps({"input_tokens": len(ids)}), content_type="application/json")
