"""Running requests for routes of every dialect: start, collect, stream."""

import asyncio
import marshal
from collections.abc import AsyncIterator, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any, TypeVar

from aiohttp import web

from text_generation_common.lora import is_adapter_name
from text_generation_router.admission_queue import PendingWork
from text_generation_router.api.core.admission import RequestPreparer
from text_generation_router.api.core.settings import Settings
from text_generation_router.api.http.caller import QosFields, quality_of_service, read_caller
from text_generation_router.api.http.keys import HOLDER, Forbidden
from text_generation_router.api.http.record import RECORD, GenerationRecord
from text_generation_router.cluster_interface import ClusterInterface
from text_generation_router.errors import InvalidRequest, ModelNotFound, ServingError
from text_generation_router.generation import GenerationResult, GenerationTimes, Sink, TokenOutput, run_generation
from text_generation_router.metrics import HttpMetrics
from text_generation_router.permits import ConcurrencyLimit
from text_generation_router.request import LogprobJson, QualityOfService, Request, TopToken
from text_generation_router.text.tokenizer import Tokenizer
from text_generation_router.text.tokenizer_pool import TokenizerPool
from text_generation_router.web.bodies import MODEL
from text_generation_router.web.body_reader import PREPARATION
from text_generation_router.web.sse import ErrorEvent, EventStream

MAX_LISTED = 10
"""Names that the error for an unknown one lists."""
TOKENS_AT_ONCE = 64
"""Tokens whose log-probabilities are written before other requests run."""
MAX_LOGPROBS = 1 << 18
"""Log-probabilities in the whole answers to one request, of new tokens and their alternatives. Each answer has its share."""
MAX_LOGPROBS_AT_ONCE = MAX_LOGPROBS // 2
"""The same of prompt tokens, also in a stream, and of new tokens where the last event of a stream repeats them."""


T = TypeVar("T")


class Collector(Sink):
    """A sink that keeps the whole output of one request, for whole replies."""

    def __init__(self, request: Request, most_logprobs: int = 0) -> None:
        """`most_logprobs`: a request with more of them fails; 0: only the text is kept."""
        self.request = request
        self._most_logprobs = self._room = most_logprobs
        self._packed: list[bytes] = []
        """The outputs, TOKENS_AT_ONCE in each: as objects they take ten times as much."""
        self._outputs: list[list[Any]] = []
        """The last outputs, which are not packed yet."""
        self._sum_of_logprobs, self._known_logprobs = 0.0, 0
        self.prompt_logprobs: Sequence[LogprobJson] = ()
        self._prompt_tops: Sequence[bytes] = ()
        self.ended: asyncio.Future[GenerationResult] = asyncio.get_running_loop().create_future()
        """The end of the request, or its failure."""
        self.times = GenerationTimes()

    def on_output(self, output: TokenOutput) -> None:
        if self._most_logprobs:
            self._keep(output)
        if output.ending is not None and not self.ended.done():
            self.ended.set_result(output.ending)

    def _keep(self, output: TokenOutput) -> None:
        self._room -= 1 + len(output.top)
        if self._room < 0:
            self._packed.clear()
            self._outputs.clear()
            self.on_failure(too_many_logprobs("new tokens of each answer", self._most_logprobs))
            return
        if output.logprob != b"null":
            self._sum_of_logprobs += float(output.logprob)
            self._known_logprobs += 1
        self._outputs.append([*output[:-1]])
        if len(self._outputs) == TOKENS_AT_ONCE:
            self._packed.append(marshal.dumps(self._outputs))
            self._outputs.clear()

    def on_prompt_logprobs(self, logprobs: Sequence[LogprobJson], tops: Iterable[Sequence[TopToken]]) -> None:
        self.prompt_logprobs = logprobs
        self._prompt_tops = [marshal.dumps(list(top)) for top in tops]

    @property
    def prompt_tops(self) -> Iterator[Sequence[TopToken]]:
        """The most probable tokens at each position of the prompt."""
        return map(marshal.loads, self._prompt_tops)

    def on_failure(self, error: ServingError) -> None:
        if not self.ended.done():
            self.ended.set_exception(error)
            self.ended.exception()  # only the first of several failures is raised; this silences asyncio for the others

    def take_outputs(self) -> Iterator[TokenOutput]:
        """Yield the outputs, and forget them: a reply of many tokens is written while they go."""
        packed, outputs, ending = self._packed, self._outputs, self.ended.result()
        self._packed, self._outputs = [], []
        for output in chain(chain.from_iterable(map(marshal.loads, packed)), outputs):
            output.append(ending if output[0] == ending.generated_tokens else None)
            yield TokenOutput(*output)

    @property
    def mean_logprob(self) -> float:
        """The rank of `best_of`: the mean over tokens with a known log-probability, or -inf without one."""
        return self._sum_of_logprobs / self._known_logprobs if self._known_logprobs else float("-inf")


async def all_of(jobs: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results in order. The first failure cancels the other jobs and is raised alone."""
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(job) for job in jobs]
    except ExceptionGroup as group:
        raise group.exceptions[0] from None
    return [task.result() for task in running]


async def paced(items: Iterable[T]) -> AsyncIterator[T]:
    """Yield tokens; other requests run between some of them: log-probabilities are megabytes."""
    for index, item in enumerate(items):
        if index % TOKENS_AT_ONCE == 0:
            await asyncio.sleep(0)
        yield item


def too_many_logprobs(of: str, most: int) -> InvalidRequest:
    """Return the refusal of a request for more log-probabilities than `most` of some tokens."""
    return InvalidRequest(
        f"the answers to this request may have {most} log-probabilities of the {of}, those of alternatives included, and "
        "would have more: ask for fewer tokens, answers or alternatives in one request"
    )


@dataclass(frozen=True, slots=True)
class Serving:
    """The services that routes use."""

    cluster: ClusterInterface
    tokenizer: Tokenizer
    tokenizer_pool: TokenizerPool
    preparer: RequestPreparer
    permits: ConcurrencyLimit
    metrics: HttpMetrics
    settings: Settings
    stage: PendingWork

    def start(self, request: web.Request, count: int = 1) -> list[GenerationRecord]:
        """Record the start of `count` generations. Raises InvalidRequest for an invalid header."""
        if MODEL not in request:
            request[MODEL] = self.settings.model_id
        record = request[RECORD]
        records = [record.start(self.metrics) for _ in range(count)]
        caller = read_caller(request.headers, record.started, request[HOLDER])
        for generation in records:
            generation.caller = caller
            generation.preparation = request[PREPARATION]
            generation.trace = record.trace
        return records

    def adapter_of(self, model: str | None, adapter: str | None = None) -> str:
        """Return `adapter`, else the one that a request's model names; "": the model itself. Raises ModelNotFound."""
        self.check_adapter(adapter)
        if model in self.cluster.adapters:
            return adapter or str(model)
        if not self.settings.serves(model):
            raise _not_found("model", model, self.model_names)
        return adapter or ""

    def check_operator(self, request: web.Request) -> None:
        """Raise Forbidden if the caller may not change the server."""
        if self.settings.api_keys and not request[HOLDER].trusted:
            raise Forbidden

    async def load_adapter(self, name: str, path: str) -> None:
        """Load a LoRA adapter on all replicas. Raises ServingError."""
        if self.settings.is_model(name):
            raise InvalidRequest(f"`lora_name` is a name of the model itself: {name}")
        if not is_adapter_name(name):
            raise InvalidRequest("`lora_name` must be printable, without comma, `=` and `@`")
        await self.cluster.set_adapter(name, path)

    async def load_named(self, request: web.Request, name: str | None, path: str | None) -> None:
        """Load the adapter of a request to trtllm-serve, if it names a new one with its folder. Raises ServingError."""
        if not (name and path) or name in self.cluster.adapters:
            return
        self.check_operator(request)
        try:
            await self.load_adapter(name, path)
        except InvalidRequest:
            if name not in self.cluster.adapters:  # else another request has loaded it
                raise

    @property
    def model_names(self) -> Collection[str]:
        """The names of the model and of its adapters, as they are listed."""
        return dict.fromkeys((*self.settings.model_names, *self.cluster.adapters))

    def listed_name(self, name: str) -> str:
        """Return the listed name of the model that a request names. Raises ModelNotFound."""
        self.adapter_of(name)
        return name if name in self.model_names or self.settings.takes_any_name else self.settings.model_names[0]

    def check_adapter(self, name: str | None) -> None:
        """Raise ModelNotFound if a request of TGI's dialect names an adapter that is not loaded. "" and None name none."""
        if name and name not in self.cluster.adapters:
            raise _not_found("adapter", name, self.cluster.adapters)

    def take_permits(
        self, records: Sequence[GenerationRecord], count: int, *asked: QosFields
    ) -> AbstractAsyncContextManager[None]:
        """Hold `count` permits for the caller of these generations; `asked` are parts of the body that may set deadlines.

        Raises Overloaded, InvalidRequest, DeadlineExceeded.
        """

        def by() -> float | None:
            qos = self.qos(records[0], *asked)
            return min((each for each in (qos.queue_by, qos.end_by) if each is not None), default=None)

        return self.permits.take(count, records[0].caller.tenant, by)

    def qos(self, record: GenerationRecord, *asked: QosFields) -> QualityOfService:
        """Return the quality of service that headers and body ask for. Raises InvalidRequest."""
        settings = self.settings
        return quality_of_service(record.caller, settings.config, *asked, separate_tenants=settings.separate_tenants)

    @contextmanager
    def run(
        self, requests: Sequence[Request], records: Sequence[GenerationRecord], sinks: Sequence[Sink]
    ) -> Iterator[None]:
        """Queue requests, each with its record and its sink. Leaving the block cancels them.

        Raises ServingError if one is refused.
        """
        scored = [request for request in requests if request.logprobs.prompt]
        if sum(len(each.prompt) * (1 + each.logprobs.prompt_top_n) for each in scored) > MAX_LOGPROBS_AT_ONCE:
            raise too_many_logprobs("prompt tokens", MAX_LOGPROBS_AT_ONCE)
        with ExitStack() as running:
            for request, record, sink in zip(requests, records, sinks, strict=True):
                if record.trace is not None:
                    request = replace(request, trace=record.trace)
                record.request = request
                times = running.enter_context(run_generation(self.cluster, request, self.tokenizer, sink))
                record.follow(times)
                record.caller.holder.spend_tokens(len(request.prompt))
                if isinstance(sink, Collector):
                    sink.times = times
            yield

    async def collect(
        self, requests: Sequence[Request], records: Sequence[GenerationRecord], *, most_logprobs: int
    ) -> list[Collector]:
        """Run requests to their ends; `most_logprobs`: of all of them, 0 if only their texts are wanted.

        Raises the first failure, which cancels the others.
        """
        collectors = [Collector(request, most_logprobs // len(requests)) for request in requests]
        with self.run(requests, records, collectors):
            ended = [collector.ended for collector in collectors]
            await asyncio.wait(ended, return_when=asyncio.FIRST_EXCEPTION)
            failed = next((each for each in ended if each.done() and each.exception()), None)
            for record, each in zip(records, ended, strict=True):
                record.ending = (failed or each).result()
        return collectors

    def cost_headers(self, characters: int) -> dict[str, str]:
        """Return TGI's response headers that are known in advance; `characters` is the length of the prompt."""
        return {"x-compute-type": self.settings.config.compute_type, "x-compute-characters": str(characters)}

    def stream(self, request: web.Request, headers: Mapping[str, str], error_event: ErrorEvent) -> EventStream:
        settings = self.settings
        return EventStream(request, headers, settings.keep_alive_s, settings.config.max_unread_bytes, error_event)


def _not_found(kind: str, name: str | None, known: Collection[str]) -> ModelNotFound:
    """Return the error for a name that is not one of `known`, with the first of those."""
    text = f"The {kind} `{name}` does not exist"
    if known:
        text += ". This server has " + ", ".join(f"`{each}`" for each in islice(known, MAX_LISTED))
    if len(known) > MAX_LISTED:
        text += f" and {len(known) - MAX_LISTED} more"
    return ModelNotFound(text)
