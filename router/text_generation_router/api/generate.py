"""TGI's generation routes: POST /generate, /generate_stream and /."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import ExitStack

import orjson
from aiohttp import web

from text_generation_router.api.admission import Admission, Permits
from text_generation_router.api.bodies import parse_body
from text_generation_router.api.record import RECORD, Record
from text_generation_router.api.replies import Collector, TokenEvents, whole_reply
from text_generation_router.api.schemas import CompatGenerateBody, GenerateBody
from text_generation_router.api.settings import Settings
from text_generation_router.api.sse import EventStream
from text_generation_router.api.validation import check_streamed, check_whole
from text_generation_router.generation import Generations
from text_generation_router.metrics import Metrics
from text_generation_router.text.tokenizer import Tokenizer


class GenerateRoutes:
    """Handlers that generate in TGI's dialect."""

    def __init__(
        self,
        generations: Generations,
        tokenizer: Tokenizer,
        admission: Admission,
        permits: Permits,
        metrics: Metrics,
        settings: Settings,
    ) -> None:
        self._generations = generations
        self._tokenizer = tokenizer
        self._admission = admission
        self._permits = permits
        self._metrics = metrics
        self._settings = settings

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """POST /generate: the whole reply at once."""
        body = await parse_body(request, GenerateBody)
        reply, headers = await self._generate_whole(request, body)
        return web.Response(body=orjson.dumps(reply), content_type="application/json", headers=headers)

    async def generate_stream(self, request: web.Request) -> web.StreamResponse:
        """POST /generate_stream: an event a token."""
        return await self._generate_streamed(request, await parse_body(request, GenerateBody))

    async def compat(self, request: web.Request) -> web.StreamResponse:
        """POST /: either of them, as Hugging Face's hosted API has it."""
        body = await parse_body(request, CompatGenerateBody)
        if body.parameters.return_full_text is None:
            parameters = body.parameters.model_copy(update={"return_full_text": self._settings.compat_return_full_text})
            body = body.model_copy(update={"parameters": parameters})
        if body.stream:
            return await self._generate_streamed(request, body)
        reply, headers = await self._generate_whole(request, body)
        return web.Response(body=orjson.dumps([reply]), content_type="application/json", headers=headers)

    async def _generate_whole(
        self, request: web.Request, body: GenerateBody
    ) -> tuple[dict[str, object], dict[str, str]]:
        record = self._start(request)
        check_whole(body.parameters, self._settings.limits)
        count = max(body.parameters.best_of or 1, 1)
        with self._permits.take(count):
            first = record.request = await self._admission.admit(body.inputs, body.parameters)
            requests = [first, *(self._admission.another(first) for _ in range(count - 1))]
            with ExitStack() as running:
                collectors = [Collector(one) for one in requests]
                for collector in collectors:
                    collector.times = running.enter_context(self._generations.run(collector.request, collector))
                # The first failure ends the others: leaving the block drops what still runs.
                await asyncio.wait([collector.ended for collector in collectors], return_when=asyncio.FIRST_EXCEPTION)
                _raise_failure(collectors)
            best = max(collectors, key=lambda collector: collector.mean_logprob)
            record.request, record.ending, record.times = best.request, best.ended.result(), best.times
            others = [collector for collector in collectors if collector is not best]
            reply = whole_reply(body, best, others, self._tokenizer)
            return reply, self._headers_of_whole(body, record)

    async def _generate_streamed(self, request: web.Request, body: GenerateBody) -> web.StreamResponse:
        record = self._start(request)
        check_streamed(body.parameters)
        with self._permits.take(1):
            admitted = record.request = await self._admission.admit(body.inputs, body.parameters)
            stream = EventStream(request, self._headers(body), self._settings.keep_alive_s, self._settings.stall_s)
            events = TokenEvents(stream, body, self._tokenizer, record)
            with self._generations.run(admitted, events) as record.times:
                return await stream.run()

    def _start(self, request: web.Request) -> Record:
        self._metrics.request_started()
        record = request[RECORD]
        record.is_generation = True
        return record

    def _headers(self, body: GenerateBody) -> dict[str, str]:
        return {
            "x-compute-type": self._settings.compute_type,
            "x-compute-characters": str(len(body.inputs)),
        }

    def _headers_of_whole(self, body: GenerateBody, record: Record) -> dict[str, str]:
        assert record.request is not None
        spent = record.spent(time.monotonic())
        return self._headers(body) | {
            "x-compute-time": str(spent.total_s),
            "x-total-time": _milliseconds(spent.total_s),
            "x-validation-time": _milliseconds(spent.validation_s),
            "x-queue-time": _milliseconds(spent.queue_s),
            "x-inference-time": _milliseconds(spent.inference_s),
            "x-time-per-token": _milliseconds(spent.per_token_s),
            "x-prompt-tokens": str(len(record.request.prompt)),
            "x-generated-tokens": str(spent.generated_tokens),
        }


def _raise_failure(collectors: Sequence[Collector]) -> None:
    for collector in collectors:
        if collector.ended.done():
            collector.ended.result()


def _milliseconds(seconds: float) -> str:
    return str(int(seconds * 1000))
