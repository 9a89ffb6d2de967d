"""The TrtllmService of trtllm_service.proto, TensorRT-LLM's gateway protocol, over the shard's engine.

    request       GenerateRequest → new sequences, or the name of the field that cannot be honoured
    session       new sequences → slots of one engine session that all calls share
    call          tokens → chunks and completes
    stop_strings  stop strings → number of tokens to send
    describe      model, server and tokenizer
    events        events of the KV cache and load

Only self-scheduling engines are served: a gateway has no KV blocks to assign. With any other engine every call is UNIMPLEMENTED,
as if the service did not exist.
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
from text_generation_shard.engine import Engine, Scheduling
from text_generation_shard.gateway.call import GatewayCall
from text_generation_shard.gateway.describe import NoTokenizer, archive_chunks, build_archive, model_info, server_info
from text_generation_shard.gateway.events import KvEventLog
from text_generation_shard.gateway.request import CallFailed, GatewayRequest, read_request, refused
from text_generation_shard.gateway.session import MAX_WAITING, CallRegistry
from text_generation_shard.gateway.stop_strings import GatewayTokenizer, UnusableTokenizer
from text_generation_shard.session import SessionOwner

log = structlog.get_logger()

HEALTHY = "OK"

Request = TypeVar("Request")
Response = TypeVar("Response")

GenerateContext = grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse]


class GatewayServicer(trtllm_service_pb2_grpc.TrtllmServiceServicer):
    """Serves the engine of `owner` to a gateway, while no router drives it."""

    def __init__(
        self,
        owner: SessionOwner,
        model_folder: Path | None,
        *,
        tensor_parallel: int = 1,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        """`model_folder` has the tokenizer, if there is one. At most `max_waiting` sequences wait for a slot."""
        self._owner = owner
        self._folder = model_folder
        self._tensor_parallel = tensor_parallel
        self._calls = CallRegistry(owner, max_waiting)
        self._tokenizer: GatewayTokenizer | None = None
        self._archive: bytes | None = None
        self._reading = asyncio.Lock()
        self._events: KvEventLog | None = None
        """None before the first request, and if the engine makes none."""
        self._follows = False

    async def Generate(  # type: ignore[override]  # noqa: N802 - the stubs know generators only, gRPC also context.write
        self, request: pb.GenerateRequest, context: GenerateContext
    ) -> None:
        engine = await self._engine(context)
        self._follow_events(engine)
        try:
            parsed = read_request(request, engine.info)
            call = GatewayCall(parsed, await self._tokenizer_for(parsed))
            async with self._calls.running(call, engine):
                await _answer(call, context)
        except CallFailed as failure:
            log.info("gateway request failed", request_id=request.request_id, code=failure.code.name)
            await context.abort(failure.code, failure.message)
        log.info(
            "gateway request finished",
            request_id=request.request_id,
            finish_reasons=[output.finish_reason for output in call.outputs],
            prompt_tokens=len(parsed.prompt),
            new_tokens=sum(len(output.token_ids) for output in call.outputs),
        )

    async def Abort(  # noqa: N802 - gRPC's name
        self, request: pb.AbortRequest, context: grpc.aio.ServicerContext[pb.AbortRequest, pb.AbortResponse]
    ) -> pb.AbortResponse:
        await self._check_service(context)
        found = self._calls.abort(request.request_id)
        return pb.AbortResponse(success=found, message="aborted" if found else "no request of this id is running")

    async def Embed(  # noqa: N802 - gRPC's name
        self, request: pb.EmbedRequest, context: grpc.aio.ServicerContext[pb.EmbedRequest, pb.EmbedResponse]
    ) -> pb.EmbedResponse:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "embeddings are not served")

    async def HealthCheck(  # noqa: N802 - gRPC's name
        self,
        request: pb.HealthCheckRequest,
        context: grpc.aio.ServicerContext[pb.HealthCheckRequest, pb.HealthCheckResponse],
    ) -> pb.HealthCheckResponse:
        await self._check_service(context)
        problem = self._calls.problem
        return pb.HealthCheckResponse(status=HEALTHY if problem is None else problem.message)

    async def GetModelInfo(  # noqa: N802 - gRPC's name
        self,
        request: pb.GetModelInfoRequest,
        context: grpc.aio.ServicerContext[pb.GetModelInfoRequest, pb.GetModelInfoResponse],
    ) -> pb.GetModelInfoResponse:
        engine = await self._engine(context)
        return model_info(engine.info, self._folder)

    async def GetServerInfo(  # noqa: N802 - gRPC's name
        self,
        request: pb.GetServerInfoRequest,
        context: grpc.aio.ServicerContext[pb.GetServerInfoRequest, pb.GetServerInfoResponse],
    ) -> pb.GetServerInfoResponse:
        engine = await self._engine(context)
        return server_info(engine.info, self._tensor_parallel)

    async def GetTokenizer(  # type: ignore[override]  # noqa: N802 - as Generate
        self,
        request: common.GetTokenizerRequest,
        context: grpc.aio.ServicerContext[common.GetTokenizerRequest, common.GetTokenizerChunk],
    ) -> None:
        await self._check_service(context)
        async with self._reading:
            if self._archive is None:
                try:
                    self._archive = await asyncio.to_thread(build_archive, self._folder)
                except NoTokenizer as error:
                    await context.abort(grpc.StatusCode.UNIMPLEMENTED, str(error))
        for chunk in archive_chunks(self._archive):
            await context.write(chunk)

    async def SubscribeKvEvents(  # type: ignore[override]  # noqa: N802 - as Generate
        self,
        request: common.SubscribeKvEventsRequest,
        context: grpc.aio.ServicerContext[common.SubscribeKvEventsRequest, common.KvEventBatch],
    ) -> None:
        engine = await self._engine(context)
        self._follow_events(engine)
        if self._events is None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "the engine makes no events of its KV cache")
        async for batch in self._events.batches(request.start_sequence_number):
            await context.write(batch)

    def _follow_events(self, engine: Engine) -> None:
        """Keep the engine's events from now on, so that a later subscription knows the blocks there are."""
        if not self._follows:
            self._follows = True
            events = KvEventLog(engine, lambda: self._owner.num_blocks)
            self._events = events if engine.on_kv_events(events.add) else None

    async def _check_service(self, context: grpc.aio.ServicerContext[Request, Response]) -> None:
        """Abort if the engine does not schedule for itself."""
        engine = self._owner.engine
        if engine is not None and engine.info.scheduling is not Scheduling.SELF:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "the engine does not schedule for itself")

    async def _engine(self, context: grpc.aio.ServicerContext[Request, Response]) -> Engine:
        """Return the engine. Abort while it loads, or if it does not schedule for itself."""
        await self._check_service(context)
        if (engine := self._owner.engine) is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the model is loading")
        return engine

    async def _tokenizer_for(self, request: GatewayRequest) -> GatewayTokenizer | None:
        """Return the tokenizer if `request` has stop strings. Raises CallFailed if there is none."""
        if not request.stops:
            return None
        async with self._reading:
            if self._tokenizer is None:
                try:
                    self._tokenizer = await asyncio.to_thread(GatewayTokenizer.load, self._folder)
                except UnusableTokenizer as error:
                    raise refused(f"stop is not supported: {error}; stop_token_ids are served") from error
        return self._tokenizer


async def _answer(call: GatewayCall, context: GenerateContext) -> None:
    """Write chunks as tokens arrive, and the completes at the end. Raises CallFailed."""
    over = False
    while not over:
        await call.changed.wait()
        call.changed.clear()
        over = call.is_over
        if (failure := call.failure) is not None:
            raise failure
        if call.request.streaming:
            for output in call.outputs:
                if (message := call.next_chunk(output)) is not None:
                    await context.write(message)
    for output in call.outputs:
        await context.write(call.complete(output))
