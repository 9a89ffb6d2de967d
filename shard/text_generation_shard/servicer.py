"""The Shard service of shard.proto: RPC, engine call, reply. Info answers while the engine computes."""

import asyncio
import time
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from text_generation_common.log import log
from text_generation_common.progress import finished_work
from text_generation_proto.channel import SESSION_OPEN
from text_generation_proto.parts import BadParts, Joiner, most_orders, split
from text_generation_proto.v1 import shard_pb2 as pb
from text_generation_proto.v1 import shard_pb2_grpc
from text_generation_proto.values import WarmUpLimits
from text_generation_shard.adapter_changes import AdapterChanges
from text_generation_shard.config import ShardConfig
from text_generation_shard.convert import InvalidOrders, info_to_pb, orders_from_pb, pool_to_pb, report_to_pb
from text_generation_shard.engine import Engine, EngineError, InsufficientMemory, StepResult
from text_generation_shard.guard import settled
from text_generation_shard.health import ShardHealth
from text_generation_shard.host_contents import host_contents
from text_generation_shard.session import EngineSession, SessionOwner

CLOSING_S = 0.9
"""Seconds for a router to end the stream of a shard that stops; less than the time that calls have to end."""

RunContext = grpc.aio.ServicerContext[pb.Orders, pb.StepReport]


class ShardServicer(shard_pb2_grpc.ShardServicer):
    """Serves the engine of `owner` to one router. Info and WarmUp are UNAVAILABLE while the model loads."""

    def __init__(self, owner: SessionOwner, health: ShardHealth, config: ShardConfig) -> None:
        self._owner, self._health, self._config = owner, health, config
        self._host_cache = host_contents(config)
        self._adapters = AdapterChanges(config, owner)

    async def Info(  # noqa: N802 - gRPC's name
        self, request: pb.InfoRequest, context: grpc.aio.ServicerContext[pb.InfoRequest, pb.InfoResponse]
    ) -> pb.InfoResponse:
        engine = await self._loaded(context)
        answer = info_to_pb(engine.info, self._config.rank, self._config.world_size)
        answer.loads_adapters = bool(self._config.lora_modules_dir)
        loaded = self._adapters.loaded.items()
        answer.loaded_adapters.extend(pb.LoadAdapterRequest(name=name, path=path) for name, path in loaded)
        return answer

    async def LoadAdapter(  # noqa: N802 - gRPC's name
        self, request: pb.LoadAdapterRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.LoadAdapterResponse:
        await self._change(context, request.name, request.path)
        return pb.LoadAdapterResponse()

    async def UnloadAdapter(  # noqa: N802 - gRPC's name
        self, request: pb.UnloadAdapterRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.UnloadAdapterResponse:
        await self._change(context, request.name, None)
        return pb.UnloadAdapterResponse()

    async def _change(self, context: grpc.aio.ServicerContext[Any, Any], name: str, path: str | None) -> None:
        engine = await self._loaded(context)
        await self._check_leads(context)
        # Made to its end, also if the caller does not wait for it.
        if (refusal := await asyncio.shield(self._adapters.change(engine, name, path))) is not None:
            await context.abort(*refusal)

    async def WarmUp(  # noqa: N802 - gRPC's name
        self, request: pb.WarmUpRequest, context: grpc.aio.ServicerContext[pb.WarmUpRequest, pb.WarmUpResponse]
    ) -> pb.WarmUpResponse:
        engine = await self._loaded(context)
        await self._check_leads(context)
        limits, block_size = WarmUpLimits.of(request), engine.info.block_size
        started = time.monotonic()
        warming = self._owner.warmed_up(limits)
        was_warm = warming is not None and warming.done()
        if warming is None:
            if not await self._owner.wait_until_free():
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "a Run session is open")
            warming = self._owner.warmed_up(limits) or self._owner.warm_up(engine, limits)
        try:
            groups = await asyncio.shield(warming)  # other calls may wait for it, too
        except InsufficientMemory as error:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        except EngineError as error:
            await context.abort(grpc.StatusCode.INTERNAL, str(error))
        if min(group.num_blocks for group in groups) < 1:
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED, f"the KV pool is smaller than a block of {block_size} tokens"
            )
        seconds = time.monotonic() - started
        if not was_warm:
            told: dict[str, object] = {"kv_blocks": groups[0].num_blocks}
            if groups[1:]:
                told["further_groups"] = {each.name: each.num_blocks for each in groups[1:]}
            if groups[0].host_blocks:
                told["host_blocks"] = {each.name: each.host_blocks for each in groups}
            phases = {work: round(each, 1) for work, each in finished_work.items()}
            log.info("warmed up", **told, block_size=block_size, seconds=round(seconds, 2), seconds_by_work=phases)
            finished_work.clear()
            if self._host_cache != await asyncio.to_thread(host_contents, self._config):
                log.warning("the host cache is not used: files of the model changed while it was loaded")
                self._host_cache = ""
        answer = pool_to_pb(groups, block_size)
        answer.warm_up_seconds, answer.was_warm = seconds, was_warm
        answer.host_cache = self._host_cache if groups[0].host_blocks else ""
        return answer

    @settled
    async def Run(  # type: ignore[override]  # noqa: N802 - the stubs know generators only, gRPC also context.write
        self, request_iterator: object, context: RunContext
    ) -> None:
        owner = self._owner
        await self._check_leads(context)
        if owner.engine is None or not owner.is_warm:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "WarmUp comes first")
        if not await owner.wait_until_free():
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "another Run session is open")
        reports: asyncio.Queue[StepResult | None] = asyncio.Queue()
        session = owner.open_session(owner.engine, reports.put_nowait)
        try:
            await self._health.add_drivers(1)
            await context.send_initial_metadata(SESSION_OPEN)  # a refusal has none
            most_bytes = most_orders(info_to_pb(owner.engine.info, self._config.rank, self._config.world_size))
            async with asyncio.TaskGroup() as tasks:
                reader = tasks.create_task(_read_orders(session, context, most_bytes, copies=bool(self._host_cache)))
                while (report := await reports.get()) is not None:
                    message = report_to_pb(report)
                    message.draining = owner.draining
                    if gpus := owner.take_gpus():
                        message.gpus.extend(gpus)
                    # Nothing else in a report is large; to measure each would cost time.
                    for part in split(message) if report.prompt_logprobs or report.generated_scores else (message,):
                        await context.write(part)
                if owner.stopping and not owner.crashed.is_set():
                    # A router that wrote to a closed stream would see a broken pipe, and wait for a restart.
                    await context.write(pb.StepReport(closing=True))
                    await asyncio.wait((reader,), timeout=CLOSING_S)
                reader.cancel()
        except* (InvalidOrders, BadParts) as group:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(group.exceptions[0]))
        finally:
            session.end()
            await self._health.add_drivers(-1)
        if owner.crashed.is_set():
            await context.abort(grpc.StatusCode.INTERNAL, "the engine failed")

    async def _loaded(self, context: grpc.aio.ServicerContext[Any, Any]) -> Engine:
        if self._owner.engine is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the model is loading")
        return self._owner.engine

    async def _check_leads(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        if self._config.rank:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"rank {self._config.rank} follows: call rank 0")


async def _read_orders(session: EngineSession, context: RunContext, most_bytes: int, *, copies: bool) -> None:
    """Pass on the client's orders until it has no more; `copies`: they may have some. Raises InvalidOrders, BadParts."""
    last = 0
    parts = Joiner[pb.Orders](most_bytes)
    try:
        while isinstance(read := await context.read(), pb.Orders):
            if (message := parts.join(read)) is None:
                continue
            if message.number != last + 1:
                raise InvalidOrders(f"orders {message.number} came after orders {last}")
            last = message.number
            if message.copies and not copies:
                raise InvalidOrders("there is no host cache to copy blocks from or to")
            session.order(orders_from_pb(message))
    except DecodeError as error:
        raise InvalidOrders("a message is not a valid Orders") from error
    session.end()
