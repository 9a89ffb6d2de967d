"""TGI's generation routes: POST /generate, /generate_stream and /.

Validation rules are numbered as in TGI. Rules 0 and 1 and the refusal of neutral values exist only in TGI and are here;
the others are in core/parameters.py.
"""

import orjson
from aiohttp import web

from text_generation_proto.parameters import Api
from text_generation_proto.values import SAMPLING_PARAMETERS, LogprobOptions, Sampling
from text_generation_router.api.core.parameters import GenerationOptions, given_sampling
from text_generation_router.api.core.serving import MAX_LOGPROBS, Serving
from text_generation_router.api.core.settings import Limits
from text_generation_router.api.http.caller import QosFields
from text_generation_router.api.http.dialects import tgi_error_event
from text_generation_router.api.http.record import GenerationRecord, compute_time_header, timing_headers
from text_generation_router.api.tgi.replies import GenerateAnswer, TokenEvents, whole_reply
from text_generation_router.api.tgi.schemas import CompatGenerateBody, GenerateBody, GenerateParameters
from text_generation_router.errors import InvalidRequest
from text_generation_router.web.bodies import JSON, parse_body


class GenerateRoutes:
    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """POST /generate: return the whole reply.

        `inputs` is the prompt as the model reads it, without a chat template.
        """
        body = await parse_body(request, GenerateBody)
        [record] = self._serving.start(request)
        return self._whole(body, record, await self.reply(body, record))

    async def generate_stream(self, request: web.Request) -> web.StreamResponse:
        """POST /generate_stream: stream an event per token.

        The data of each event is a `StreamEvent`. An error after the first event is an `ErrorAnswer`, the last one.
        """
        return await self._streamed(request, await parse_body(request, GenerateBody))

    async def compat_generate(self, request: web.Request) -> web.StreamResponse:
        """POST /: whole or streamed, as in Hugging Face's hosted API.

        The same as `/generate`, in a list, or with `stream` as `/generate_stream`. The text has the prompt before it unless
        `return_full_text` is false.
        """
        return await self.answer_compat(request, await parse_body(request, CompatGenerateBody))

    async def answer_compat(self, request: web.Request, body: CompatGenerateBody) -> web.StreamResponse:
        """Answer a body of POST / that another route parsed."""
        if body.parameters.return_full_text is None:
            # TGI's default for local models.
            parameters = body.parameters.model_copy(update={"return_full_text": True})
            body = body.model_copy(update={"parameters": parameters})
        if body.stream:
            return await self._streamed(request, body)
        [record] = self._serving.start(request)
        return self._whole(body, record, [await self.reply(body, record)])

    async def reply(self, body: GenerateBody, record: GenerationRecord) -> GenerateAnswer:
        """Return the whole reply to a body. Raises ServingError."""
        async with self._serving.take_permits([record], self.permits_needed(body.parameters), body.parameters, body):
            return await self.permitted_reply(body, record)

    def permits_needed(self, parameters: GenerateParameters) -> int:
        """Return the permits that a whole reply needs: one for each sequence tried.

        Raises InvalidRequest, ModelNotFound.
        """
        check_whole(parameters, self._serving.settings.limits)
        self._serving.check_adapter(parameters.adapter_id)
        return parameters.best_of or 1

    async def permitted_reply(self, body: GenerateBody, record: GenerationRecord, *around: QosFields) -> GenerateAnswer:
        """Return the whole reply for a caller that holds its permits (`permits_needed`).

        `around` are parts of the body of several replies that this is one of.
        """
        serving = self._serving
        count = self.permits_needed(body.parameters)
        qos = serving.qos(record, body.parameters, body, *around)
        options = to_options(body.parameters)
        inputs, images = serving.preparer.split_images(body.inputs)
        requests = await serving.preparer.prepare(inputs, options, qos, count, images)
        # One generation counts, however many sequences are tried for it.
        collectors = await serving.collect(
            requests, [record] * count, most_logprobs=MAX_LOGPROBS if options.logprobs.tokens else 0
        )
        best = max(collectors, key=lambda collector: collector.mean_logprob)
        record.request, record.ending, record.times = best.request, best.ended.result(), best.times
        others = [collector for collector in collectors if collector is not best]
        return await whole_reply(body, best, others, serving.tokenizer, record.cached_tokens)

    async def _streamed(self, request: web.Request, body: GenerateBody) -> web.StreamResponse:
        serving = self._serving
        [record] = serving.start(request)
        check_streamed(body.parameters)
        serving.check_adapter(body.parameters.adapter_id)
        async with serving.take_permits([record], 1, body.parameters, body):
            qos = serving.qos(record, body.parameters, body)
            options = to_options(body.parameters, shows_tokens=True)
            inputs, images = serving.preparer.split_images(body.inputs)
            requests = await serving.preparer.prepare(inputs, options, qos, images=images)
            stream = serving.stream(request, serving.cost_headers(len(body.inputs)), tgi_error_event)
            events = TokenEvents(stream, body, serving.tokenizer, record)
            with serving.run(requests, [record], [events]):
                return await stream.run()

    def _whole(self, body: GenerateBody, record: GenerationRecord, reply: object) -> web.Response:
        headers = self._serving.cost_headers(len(body.inputs)) | compute_time_header(record) | timing_headers([record])
        return web.Response(body=orjson.dumps(reply), content_type=JSON, headers=headers)


def check_whole(parameters: GenerateParameters, limits: Limits) -> None:
    """Check rules 0a and 0b, of replies sent whole. Raises InvalidRequest."""
    best_of = parameters.best_of or 1
    if best_of > 1 and limits.max_best_of == 1:
        raise InvalidRequest("`best_of` != 1 is not allowed for this endpoint")
    if best_of > limits.max_best_of:
        raise InvalidRequest(f"`best_of` must be > 0 and <= {limits.max_best_of}. Given: {best_of}")
    if best_of > 1 and "tokens" in limits.unsupported:
        reason = limits.unsupported["tokens"]
        raise InvalidRequest(f"`best_of` is not supported by this engine: it needs log-probabilities, and {reason}")


def check_streamed(parameters: GenerateParameters) -> None:
    """Check rules 0s and 0t, of streamed replies. Raises InvalidRequest."""
    if parameters.best_of not in (None, 1):
        raise InvalidRequest("`best_of` != 1 is not supported when streaming tokens")
    if parameters.decoder_input_details:
        raise InvalidRequest("`decoder_input_details` == true is not supported when streaming tokens")


def to_options(parameters: GenerateParameters, *, shows_tokens: bool = False) -> GenerationOptions:
    """Return the options; `shows_tokens`: the reply has every token.

    Raises InvalidRequest for rules 1 to 7, which TGI applies to neutral values too.

    Sampling is greedy unless `do_sample` is set or a parameter that filters or scales has another value than its
    neutral one. Rule 1 counts any such parameter as sampling, also at its neutral value.
    """
    given = given_sampling(parameters, Api.TGI)
    best_of = parameters.best_of or 1
    present = [parameter for parameter in SAMPLING_PARAMETERS if parameter.field in given]
    sampled = parameters.do_sample
    if best_of > 1 and not (sampled or any(parameter.samples for parameter in present)):
        raise InvalidRequest("you must use sampling when `best_of` is > 1")
    for parameter in present:
        value = given[parameter.field]
        if parameter.range is not None and value not in parameter.range:
            raise InvalidRequest(f"{parameter.label(Api.TGI)} {parameter.range.rule}")
        sampled = sampled or (parameter.samples and value != parameter.neutral)
    return GenerationOptions(
        api=Api.TGI,
        sampling=Sampling(**{"greedy": not sampled, "seed": None, **given}),
        max_new_tokens=parameters.max_new_tokens,
        stop_sequences=tuple(parameters.stop),
        keep_stop_text=True,
        logprobs=LogprobOptions(
            parameters.top_n_tokens or 0,
            prompt=parameters.decoder_input_details,
            # `best_of` ranks by them.
            tokens=shows_tokens or parameters.details or parameters.decoder_input_details or best_of > 1,
        ),
        grammar=parameters.grammar,
        adapter=parameters.adapter_id or "",
        best_of=best_of,
        truncate=parameters.truncate,
    )
