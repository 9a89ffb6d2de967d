"""POST /v1/responses, stateless: nothing is stored, so nothing can be fetched, continued or deleted."""

from __future__ import annotations

from functools import partial

from aiohttp import web

from text_generation_router.api.core.serving import Serving
from text_generation_router.api.core.turns import ChatPreparer, ChatRequest
from text_generation_router.api.http.bodies import parse_body
from text_generation_router.api.openai.blocks import CachedTokens
from text_generation_router.api.openai.ids import named
from text_generation_router.api.openai.one_answer import answer
from text_generation_router.api.openai.responses_events import ResponseScript
from text_generation_router.api.openai.responses_input import to_asked
from text_generation_router.api.openai.responses_schemas import ResponsesBody
from text_generation_router.errors import NotFound


class ResponsesRoutes:
    """Handlers of OpenAI's Responses API."""

    def __init__(self, serving: Serving, turns: ChatPreparer) -> None:
        self._serving = serving
        self._turns = turns

    async def create(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/responses: an answer to a conversation, whole or in events."""
        body = await parse_body(request, ResponsesBody)

        def script(turn: ChatRequest, cached_tokens: CachedTokens) -> ResponseScript:
            head = named("resp_", body.model, self._serving.settings)
            return ResponseScript(body, head, turn.prompt_tokens, cached_tokens)

        asked = partial(to_asked, body)
        return await answer(request, self._serving, self._turns, asked, script, fields=body, stream=bool(body.stream))

    async def stored(self, request: web.Request) -> web.StreamResponse:
        """GET, DELETE /v1/responses/{id}: there is none."""
        raise NotFound(f"There is no response {request.match_info['id'][:64]!r}: responses are not stored here")
