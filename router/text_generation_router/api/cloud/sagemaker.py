"""Amazon SageMaker: one route, POST /invocations. A key of the body selects the handler."""

from aiohttp import web

from text_generation_router.api.http.dialects import DIALECT, Dialect
from text_generation_router.api.openai.chat import ChatRoutes
from text_generation_router.api.openai.completions import CompletionRoutes
from text_generation_router.api.openai.schemas import ChatBody, CompletionBody
from text_generation_router.api.tgi.generate import GenerateRoutes
from text_generation_router.api.tgi.schemas import CompatGenerateBody
from text_generation_router.web.bodies import parse_json, validate
from text_generation_router.web.body_errors import InvalidBody

_SCHEMAS: dict[str, type[CompatGenerateBody | ChatBody | CompletionBody]] = {
    "inputs": CompatGenerateBody, "messages": ChatBody, "prompt": CompletionBody,
}  # fmt: skip
InvocationBody = CompatGenerateBody | ChatBody | CompletionBody
"""Body of /invocations. The first present key of `inputs`, `messages` and `prompt` selects the type."""


class SageMakerRoutes:
    def __init__(self, generate: GenerateRoutes, chat: ChatRoutes, completions: CompletionRoutes) -> None:
        self._generate = generate
        self._chat = chat
        self._completions = completions

    async def invoke(self, request: web.Request) -> web.StreamResponse:
        """POST /invocations: answer as /, /v1/chat/completions or /v1/completions, by the keys of the body.

        `inputs`, `messages` or `prompt` selects the route.
        """
        body = await parse_json(request, _invocation)
        if isinstance(body, CompatGenerateBody):
            return await self._generate.answer_compat(request, body)
        request[DIALECT] = Dialect.OPENAI
        if isinstance(body, ChatBody):
            return await self._chat.answer(request, body)
        return await self._completions.answer(request, body)


def _invocation(value: object) -> InvocationBody:
    for key, schema in _SCHEMAS.items():
        if isinstance(value, dict) and key in value:
            return validate(value, schema)
    raise InvalidBody("the body must have `inputs`, `messages` or `prompt`")
