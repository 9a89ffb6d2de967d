"""Google's Vertex AI: several prompts or conversations in, a text for each out.

Unlike TGI, which drops every parameter but `max_new_tokens` and `seed`, all parameters count, and errors keep their cause
and status.
"""

from typing import Annotated

from aiohttp import web
from pydantic import Discriminator, Field, Tag

from text_generation_router.api.core.serving import Serving, all_of
from text_generation_router.api.http.caller import QosFields
from text_generation_router.api.http.record import GenerationRecord
from text_generation_router.api.openai.chat import ChatRoutes
from text_generation_router.api.openai.schemas import ChatBody
from text_generation_router.api.tgi.generate import GenerateRoutes
from text_generation_router.api.tgi.schemas import GenerateBody, GenerateParameters
from text_generation_router.error_attributes import Operation
from text_generation_router.errors import InvalidRequest
from text_generation_router.web.bodies import ResponseBody, json_response, parse_body

MAX_INSTANCES = 1024


class NoInstances(InvalidRequest):
    """The request has no instances."""

    error_type = "Input validation error"
    message = "`instances` cannot be empty"
    operations = Operation.PREDICT


class VertexParameters(GenerateParameters):
    """TGI's parameters with other defaults."""

    do_sample: bool = True
    """Sample instead of taking the most probable token."""


class TextInstance(QosFields):
    """A prompt."""

    inputs: str
    """The prompt."""
    parameters: VertexParameters | None = None


KINDS = {"inputs": "text", "messages": "chat"}
"""Kinds of instances, by the field that each has. They appear in places of errors, so they are not names of fields."""


def _kind(value: object) -> str | None:
    if isinstance(value, dict):
        return next((kind for field, kind in KINDS.items() if field in value), None)
    return "text" if isinstance(value, TextInstance) else "chat"


Instance = Annotated[
    Annotated[TextInstance, Tag("text")] | Annotated[ChatBody, Tag("chat")],
    Discriminator(_kind, custom_error_type="untagged", custom_error_message="must have `inputs` or `messages`"),
]


class VertexBody(QosFields):
    """Body of /vertex."""

    instances: Annotated[list[Instance], Field(max_length=MAX_INSTANCES, fail_fast=True)]
    """The prompts and conversations to answer."""


class VertexAnswer(ResponseBody):
    """One text per instance, in order."""

    predictions: list[str]


class VertexRoutes:
    def __init__(self, serving: Serving, generate: GenerateRoutes, chat: ChatRoutes) -> None:
        self._serving = serving
        self._generate = generate
        self._chat = chat

    async def predict(self, request: web.Request) -> web.StreamResponse:
        """POST /vertex: generate a text per instance, in order; one failure fails all.

        An instance is a prompt with parameters, or the body of a chat.
        """
        body = await parse_body(request, VertexBody)
        instances = body.instances
        if not instances:
            raise NoInstances
        records = self._serving.start(request, len(instances))
        # All or nothing: the permits of all are taken at once and held until the last has its text.
        async with self._serving.take_permits(
            records, sum(self._permits_needed(instance) for instance in instances), body
        ):
            texts = await all_of(
                [
                    self._text(request, instance, record, body)
                    for instance, record in zip(instances, records, strict=True)
                ]
            )
        answer: VertexAnswer = {"predictions": texts}
        return json_response(answer)

    def _permits_needed(self, instance: TextInstance | ChatBody) -> int:
        if isinstance(instance, TextInstance):
            return self._generate.permits_needed(instance.parameters or VertexParameters())
        return 1

    async def _text(
        self, request: web.Request, instance: TextInstance | ChatBody, record: GenerationRecord, around: VertexBody
    ) -> str:
        if isinstance(instance, TextInstance):
            parameters = instance.parameters or VertexParameters()
            body = GenerateBody(inputs=instance.inputs, parameters=parameters)
            return (await self._generate.permitted_reply(body, record, instance, around))["generated_text"]
        return await self._chat.text(request, instance, record, around)
