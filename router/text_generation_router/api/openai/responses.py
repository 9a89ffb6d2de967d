"""POST /v1/responses, stateless: responses are not stored, so none can be fetched, continued or deleted."""

from collections.abc import Sequence

from aiohttp import web

from text_generation_router.api.core.chat import ChatRequest
from text_generation_router.api.core.ids import named
from text_generation_router.api.core.one_answer import AnswerRoutes, CachedTokens
from text_generation_router.api.openai.answers import ContentLogprob, content_logprobs
from text_generation_router.api.openai.responses_events import ResponseWriter
from text_generation_router.api.openai.responses_input import asks_for_logprobs, to_conversation, to_options
from text_generation_router.api.openai.responses_schemas import ResponsesBody
from text_generation_router.generation import TokenOutput
from text_generation_router.web.bodies import parse_body


class ResponsesRoutes(AnswerRoutes):
    async def create_response(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/responses: answer a conversation, whole or in events.

        Responses are not stored: send the whole conversation each time. With `stream` the data of each event is a
        `ResponseEvent`.
        """
        body = await parse_body(request, ResponsesBody)

        def writer(chat: ChatRequest, cached_tokens: CachedTokens) -> ResponseWriter:
            head = named("resp_", body.model, self._serving.settings)

            def logprobs(outputs: Sequence[TokenOutput]) -> list[ContentLogprob]:
                return content_logprobs(outputs, self._serving.tokenizer, body.top_logprobs or 0)["content"]

            return ResponseWriter(
                body, head, chat.prompt_tokens, cached_tokens, logprobs if asks_for_logprobs(body) else None
            )

        return await self._answer(request, body, to_conversation, to_options, writer)
