"""KServe's open inference protocol, version 2, with TGI's bodies.

Unlike TGI, readiness is checked, outputs keep the order of inputs, and errors keep their cause. A text is a list of bytes,
as in TGI, or a string, as in the protocol.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Literal

from aiohttp import web
from pydantic import Field

from text_generation_router.api.core.serving import Serving, all_of
from text_generation_router.api.http.caller import QosFields
from text_generation_router.api.http.fields import WHOLE, Name, UInt64
from text_generation_router.api.http.record import RECORD
from text_generation_router.api.tgi.generate import GenerateRoutes
from text_generation_router.api.tgi.schemas import GenerateBody, GenerateParameters
from text_generation_router.error_attributes import Operation
from text_generation_router.errors import InvalidRequest, Unhealthy
from text_generation_router.web.bodies import Body, ResponseBody, json_response, parse_body

MAX_INPUTS = 1024
"""Texts of one request, over all its inputs."""
MAX_DIMENSIONS = 16
"""Numbers of a `shape`."""


class NotUtf8(InvalidRequest):
    """An input is not UTF-8 text."""

    error_type = "utf8"
    prefix = ""
    operations = Operation.INFER


class LengthMismatch(InvalidRequest):
    """The numbers of inputs and outputs differ."""

    error_type = "length mismatch"
    prefix = ""
    message = "Inputs and outputs length mismatch"
    operations = Operation.INFER


Byte = Annotated[int, Field(ge=0, le=255)]
Bytes = Annotated[list[Byte], Field(fail_fast=True), WHOLE]
Strings = Annotated[list[str], Field(max_length=MAX_INPUTS, fail_fast=True)]


class InferInput(Body):
    """One input: one prompt as bytes, or any number of them as strings."""

    name: Name
    """The name."""
    shape: Annotated[list[UInt64], Field(max_length=MAX_DIMENSIONS, fail_fast=True)]
    """Accepted and ignored."""
    datatype: Name
    """`BYTES`."""
    data: Bytes | Strings
    """UTF-8 bytes as numbers, or strings."""

    @property
    def texts(self) -> list[str]:
        """The prompts. Raises NotUtf8."""
        if self.data and isinstance(self.data[0], str):
            return [str(text) for text in self.data]
        try:
            return [bytes(self.data).decode()]  # type: ignore[arg-type]  # all are numbers
        except UnicodeDecodeError as error:
            raise NotUtf8(
                f"invalid utf-8 sequence of {error.end - error.start} bytes from index {error.start}"
            ) from None


class InferRequestedOutput(Body):
    """The name of an output."""

    name: Name
    """The name."""


class InferBody(QosFields):
    """Body of an inference request."""

    id: Name | None = None
    """The id of the answer; default: the request's id."""
    parameters: GenerateParameters = GenerateParameters(do_sample=True)
    inputs: Annotated[list[InferInput], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)]
    """The prompts."""
    outputs: Annotated[list[InferRequestedOutput], Field(max_length=MAX_INPUTS, fail_fast=True)] | None = None
    """The names of the outputs, one per input; default: the names of the inputs."""


class LiveAnswer(ResponseBody):
    """The answer of both probes."""

    live: bool


class ServerMetadata(ResponseBody):
    """Metadata of the server or of a model."""

    name: str
    version: str
    extensions: list[str]


class InferOutput(ResponseBody):
    """One output in the form of its input: bytes as numbers, or texts."""

    name: str
    shape: list[int]
    datatype: Literal["BYTES"]
    data: list[int] | list[str]


class InferAnswer(ResponseBody):
    """The outputs, one per input."""

    id: str | None
    outputs: list[InferOutput]


class KServeRoutes:
    def __init__(self, serving: Serving, generate: GenerateRoutes, healthy: Callable[[], bool]) -> None:
        self._serving = serving
        self._generate = generate
        self._healthy = healthy

    async def live(self, request: web.Request) -> web.StreamResponse:
        """GET /v2/health/live: the process answers."""
        answer: LiveAnswer = {"live": True}
        return json_response(answer)

    async def ready(self, request: web.Request) -> web.StreamResponse:
        """GET /v2/health/ready: the server can generate."""
        if not self._healthy():
            raise Unhealthy
        return await self.live(request)

    async def server(self, request: web.Request) -> web.StreamResponse:
        """GET /v2: describe the server."""
        name, version = "text-generation-inference", self._serving.settings.version
        answer: ServerMetadata = {"name": name, "version": version, "extensions": ["health", "models", "metrics"]}
        return json_response(answer)

    async def model(self, request: web.Request) -> web.StreamResponse:
        """GET /v2/models/{name}/versions/{version}: describe the model; every name is accepted."""
        named: Mapping[str, str] = request.match_info
        answer: ServerMetadata = {"name": named["name"], "version": named["version"], "extensions": ["infer", "ready"]}
        return json_response(answer)

    async def infer(self, request: web.Request) -> web.StreamResponse:
        """POST /v2/models/{name}/versions/{version}/infer: generate a text per input, in order; one failure fails all."""
        body = await parse_body(request, InferBody)
        names = [item.name for item in (body.inputs if body.outputs is None else body.outputs)]
        if len(names) != len(body.inputs):
            raise LengthMismatch
        prompts = [item.texts for item in body.inputs]
        count = sum(len(texts) for texts in prompts)
        if count > MAX_INPUTS:  # before they count as generations
            raise InvalidRequest(f"`inputs` must have at most {MAX_INPUTS} texts in all. Given: {count}")
        texts = iter(await self._generate_all(request, [prompt for group in prompts for prompt in group], body))
        answer: InferAnswer = {
            "id": body.id or request[RECORD].http_request_id,
            "outputs": [
                _output(name, given, [next(texts) for _ in group])
                for name, given, group in zip(names, body.inputs, prompts, strict=True)
            ],
        }
        return json_response(answer)

    async def _generate_all(self, request: web.Request, prompts: Sequence[str], body: InferBody) -> list[str]:
        records = self._serving.start(request, len(prompts))
        bodies = [GenerateBody(inputs=prompt, parameters=body.parameters) for prompt in prompts]
        permits = len(prompts) * self._generate.permits_needed(body.parameters)
        # All or nothing: the permits of all are taken at once and held until the last has its text.
        async with self._serving.take_permits(records, permits, body.parameters, body):
            replies = await all_of(
                [
                    self._generate.permitted_reply(single, record, body)
                    for single, record in zip(bodies, records, strict=True)
                ]
            )
        return [reply["generated_text"] for reply in replies]


def _output(name: str, given: InferInput, texts: Sequence[str]) -> InferOutput:
    """Return the output in the form of its input: strings or bytes."""
    if given.data and isinstance(given.data[0], str):
        return {"name": name, "shape": [len(texts)], "datatype": "BYTES", "data": list(texts)}
    data = list(texts[0].encode())
    return {"name": name, "shape": [1, len(data)], "datatype": "BYTES", "data": data}
