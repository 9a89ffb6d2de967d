"""TensorRT-LLM's gateway protocol over the shard's engine: trtllm_service.proto, RPC by RPC.

    unserved, ask   a request → admissions, or the name of the field that cannot be honoured
    desk, run       admissions → slots of one session that all calls share
    output, answers tokens → chunks and completes; stop_strings, vocabulary where there are stop strings

Only engines that schedule for themselves are served so: a gateway has no KV blocks to give. Beside any other engine every call
is UNIMPLEMENTED, as if the service were not there.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TypeVar

import grpc
import structlog

from text_generation_proto.gateway import common_pb2 as common
from text_generation_proto.gateway import trtllm_service_pb2 as pb
from text_generation_proto.gateway import trtllm_service_pb2_grpc
from text_generation_shard.engine import EngineInfo, Scheduling
from text_generation_shard.gateway.answers import chunk, complete
from text_generation_shard.gateway.ask import Ask, read_ask
from text_generation_shard.gateway.bundle import NoTokenizer, build_bundle, chunks
from text_generation_shard.gateway.call import Call
from text_generation_shard.gateway.describe import model_info, server_info
from text_generation_shard.gateway.desk import MAX_WAITING, Desk
from text_generation_shard.gateway.errors import CallFailed, refused
from text_generation_shard.gateway.host import HostServicer
from text_generation_shard.gateway.vocabulary import NoVocabulary, Vocabulary

log = structlog.get_logger()

HEALTHY = "OK"

Asked = TypeVar("Asked")
Answered = TypeVar("Answered")

GenerateContext = grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse]


class GatewayServicer(trtllm_service_pb2_grpc.TrtllmServiceServicer):
    """The TrtllmService of trtllm_service.proto."""

    def __init__(
        self,
        host: HostServicer,
        model_folder: Path | None,
        *,
        tensor_parallel: int = 1,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        """`model_folder` is where the tokenizer is, if there is one. As many as `max_waiting` sequences wait for a slot."""
        self._host = host
        self._folder = model_folder
        self._tensor_parallel = tensor_parallel
        self._desk = Desk(host, max_waiting)
        self._vocabulary: Vocabulary | None = None
        self._bundle: bytes | None = None
        self._reading = asyncio.Lock()

    # -------------------------------------------------------------------------------------------------------- generate

    async def Generate(  # type: ignore[override]  # noqa: N802 - the stubs know generators only, gRPC also context.write
        self, request: pb.GenerateRequest, context: GenerateContext
    ) -> None:
        try:
            info = self._info()
            ask = read_ask(request, info)
            call = Call(ask, await self._vocabulary_for(ask))
            async with self._desk.serving(call, info.max_slots):
                await _answer(call, context)
        except CallFailed as failure:
            log.info("gateway request failed", request_id=request.request_id, code=failure.code.name)
            await context.abort(failure.code, failure.message)
        log.info(
            "gateway request finished",
            request_id=request.request_id,
            finish_reasons=[output.finish_reason for output in call.outputs],
            prompt_tokens=len(ask.prompt),
            new_tokens=sum(len(output.token_ids) for output in call.outputs),
        )

    async def Abort(  # noqa: N802 - gRPC's name
        self, request: pb.AbortRequest, context: grpc.aio.ServicerContext[pb.AbortRequest, pb.AbortResponse]
    ) -> pb.AbortResponse:
        await self._check_service(context)
        found = self._desk.abort(request.request_id)
        return pb.AbortResponse(success=found, message="aborted" if found else "no request of this id is running")

    async def Embed(  # noqa: N802 - gRPC's name
        self, request: pb.EmbedRequest, context: grpc.aio.ServicerContext[pb.EmbedRequest, pb.EmbedResponse]
    ) -> pb.EmbedResponse:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "embeddings are not served")

    # -------------------------------------------------------------------------------------------------------- describe

    async def HealthCheck(  # noqa: N802 - gRPC's name
        self,
        request: pb.HealthCheckRequest,
        context: grpc.aio.ServicerContext[pb.HealthCheckRequest, pb.HealthCheckResponse],
    ) -> pb.HealthCheckResponse:
        await self._check_service(context)
        problem = self._host.problem
        return pb.HealthCheckResponse(status=HEALTHY if problem is None else problem.message)

    async def GetModelInfo(  # noqa: N802 - gRPC's name
        self,
        request: pb.GetModelInfoRequest,
        context: grpc.aio.ServicerContext[pb.GetModelInfoRequest, pb.GetModelInfoResponse],
    ) -> pb.GetModelInfoResponse:
        try:
            return model_info(self._info(), self._folder)
        except CallFailed as failure:
            await context.abort(failure.code, failure.message)

    async def GetServerInfo(  # noqa: N802 - gRPC's name
        self,
        request: pb.GetServerInfoRequest,
        context: grpc.aio.ServicerContext[pb.GetServerInfoRequest, pb.GetServerInfoResponse],
    ) -> pb.GetServerInfoResponse:
        try:
            return server_info(self._info(), self._tensor_parallel)
        except CallFailed as failure:
            await context.abort(failure.code, failure.message)

    async def GetTokenizer(  # type: ignore[override]  # noqa: N802 - as Generate
        self,
        request: common.GetTokenizerRequest,
        context: grpc.aio.ServicerContext[common.GetTokenizerRequest, common.GetTokenizerChunk],
    ) -> None:
        await self._check_service(context)
        async with self._reading:
            if self._bundle is None:
                try:
                    self._bundle = await asyncio.to_thread(build_bundle, self._folder)
                except NoTokenizer as error:
                    await context.abort(grpc.StatusCode.UNIMPLEMENTED, str(error))
        for message in chunks(self._bundle):
            await context.write(message)

    async def SubscribeKvEvents(  # type: ignore[override]  # noqa: N802 - as Generate
        self,
        request: common.SubscribeKvEventsRequest,
        context: grpc.aio.ServicerContext[common.SubscribeKvEventsRequest, common.KvEventBatch],
    ) -> None:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "KV events are not sent")

    # --------------------------------------------------------------------------------------------------------- helpers

    def _info(self) -> EngineInfo:
        """What the engine is. Raises CallFailed if there is none yet, or it is not one to be served so."""
        engine = self._host.engine
        if engine is None:
            raise CallFailed(grpc.StatusCode.UNAVAILABLE, "the model is loading")
        if engine.info.scheduling is not Scheduling.SELF:
            raise CallFailed(grpc.StatusCode.UNIMPLEMENTED, "the engine does not schedule for itself")
        return engine.info

    async def _check_service(self, context: grpc.aio.ServicerContext[Asked, Answered]) -> None:
        engine = self._host.engine
        if engine is not None and engine.info.scheduling is not Scheduling.SELF:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "the engine does not schedule for itself")

    async def _vocabulary_for(self, ask: Ask) -> Vocabulary | None:
        """The tokenizer, where there are stop strings to find. Raises CallFailed if there is none."""
        if not ask.stops:
            return None
        async with self._reading:
            if self._vocabulary is None:
                try:
                    self._vocabulary = await asyncio.to_thread(Vocabulary.load, self._folder)
                except NoVocabulary as error:
                    raise refused(f"stop is not supported: {error}; stop_token_ids are served") from error
        return self._vocabulary


async def _answer(call: Call, context: GenerateContext) -> None:
    """Write what comes, as it comes, and the whole at the end. Raises CallFailed."""
    over = False
    while not over:
        await call.news.wait()
        call.news.clear()
        over = call.is_over
        if (failure := call.failure) is not None:
            raise failure
        if call.ask.streaming:
            for output in call.outputs:
                if (message := chunk(call.ask, output)) is not None:
                    await context.write(message)
    for output in call.outputs:
        await context.write(complete(call, output))
