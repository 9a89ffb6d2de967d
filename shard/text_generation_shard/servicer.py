"""RPC → engine call → reply. The engine runs on one thread of its own; health and Info answer beside it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from typing import ParamSpec, TypeVar

import grpc
import structlog

from text_generation_proto.v1 import shard_pb2 as pb
from text_generation_proto.v1 import shard_pb2_grpc
from text_generation_shard.convert import InvalidOrders, info_to_pb, orders_from_pb, report_to_pb
from text_generation_shard.engine import Engine, EngineError, InsufficientMemory, WarmUpLimits
from text_generation_shard.session import Report, Session

log = structlog.get_logger()

P = ParamSpec("P")
R = TypeVar("R")

RunContext = grpc.aio.ServicerContext[pb.Orders, pb.StepReport]


class EngineThread:
    """The one thread that touches the engine."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")

    async def run(self, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run one blocking call there while the event loop goes on answering."""
        return await self.submit(call, *args, **kwargs)

    def submit(self, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[R]:
        """The same as a future, for a call that outlives whoever waits for it."""
        # What the log says of every record lives in the context.
        return asyncio.wrap_future(self._pool.submit(copy_context().run, partial(call, *args, **kwargs)))

    def close(self) -> None:
        """Take nothing more; does not wait for a call in progress."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class ShardServicer(shard_pb2_grpc.ShardServicer):
    """The Shard service of shard.proto over one engine. `crashed` is set when the engine broke its contract."""

    def __init__(self, thread: EngineThread, rank: int, world_size: int) -> None:
        self._thread = thread
        self._rank = rank
        self._world_size = world_size
        self._engine: Engine | None = None
        self._num_blocks = 0
        self._session: Session | None = None
        self._session_over = asyncio.Event()
        self._session_over.set()
        self.crashed = asyncio.Event()

    def serve(self, engine: Engine) -> None:
        """Answer for `engine` from now on; before this every call is UNAVAILABLE."""
        loop = asyncio.get_running_loop()

        def broken(reason: str) -> None:
            with suppress(RuntimeError):  # the loop is closed: the process is on its way out
                loop.call_soon_threadsafe(self.crashed.set)

        self._engine = engine
        engine.on_broken(broken)

    def end_session(self) -> None:
        """End the running session at its next step boundary, if there is one."""
        if self._session is not None:
            self._session.end()

    async def Info(  # noqa: N802 - gRPC's name
        self, request: pb.InfoRequest, context: grpc.aio.ServicerContext[pb.InfoRequest, pb.InfoResponse]
    ) -> pb.InfoResponse:
        engine = self._engine
        if engine is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the model is loading")
        return info_to_pb(engine.info, self._rank, self._world_size)

    async def WarmUp(  # noqa: N802 - gRPC's name
        self, request: pb.WarmUpRequest, context: grpc.aio.ServicerContext[pb.WarmUpRequest, pb.WarmUpResponse]
    ) -> pb.WarmUpResponse:
        engine = self._engine
        if engine is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the model is loading")
        if self._rank:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, self._follows())
        if not await self._session_ended():
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "a Run session is open")
        limits = WarmUpLimits(
            max_batch_prefill_tokens=request.max_batch_prefill_tokens,
            max_batch_size=request.max_batch_size,
            max_batch_total_tokens=request.max_batch_total_tokens,
        )
        started = time.monotonic()
        self._num_blocks = 0  # until the new pool is there, there is none
        try:
            num_blocks = await self._thread.run(engine.warm_up, limits)
        except InsufficientMemory as error:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        except EngineError as error:
            await context.abort(grpc.StatusCode.INTERNAL, str(error))
        if num_blocks < 1:
            block = engine.info.block_size
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED, f"the KV pool is smaller than a block of {block} tokens"
            )
        self._num_blocks = num_blocks
        seconds = time.monotonic() - started
        log.info("warmed up", kv_blocks=self._num_blocks, block_size=engine.info.block_size, seconds=round(seconds, 2))
        return pb.WarmUpResponse(
            num_blocks=self._num_blocks, block_size=engine.info.block_size, warm_up_seconds=seconds
        )

    async def Run(  # type: ignore[override]  # noqa: N802 - the stubs know generators only, gRPC also context.write
        self, request_iterator: object, context: RunContext
    ) -> None:
        engine = self._engine
        if self._rank:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, self._follows())
        if engine is None or not self._num_blocks:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "WarmUp comes first")
        if not await self._session_ended():
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "another Run session is open")
        reports: asyncio.Queue[Report | None] = asyncio.Queue()
        session = self._open_session(engine, reports)
        try:
            await context.send_initial_metadata(())  # tells the client that the session is open
            async with asyncio.TaskGroup() as tasks:
                reader = tasks.create_task(_read_orders(session, context))
                while (report := await reports.get()) is not None:
                    await context.write(report_to_pb(report))
                reader.cancel()
        except* InvalidOrders as group:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(group.exceptions[0]))
        finally:
            session.end()
        if self.crashed.is_set():
            await context.abort(grpc.StatusCode.INTERNAL, "the engine failed")

    def _follows(self) -> str:
        return f"rank {self._rank} follows: call rank 0"

    async def _session_ended(self) -> bool:
        """Whether no session is open. One whose client is gone ends with the step in progress: that is waited for."""
        while self._session is not None:
            if not self._session.ending:
                return False
            await self._session_over.wait()
        return True

    def _open_session(self, engine: Engine, reports: asyncio.Queue[Report | None]) -> Session:
        """Start a session on the engine's thread. It outlives its call by the step in progress, if the call breaks."""
        loop = asyncio.get_running_loop()

        def emit(report: Report) -> None:
            # The queue is bounded by the grants: a sequence cannot run past them.
            with suppress(RuntimeError):  # the loop is closed: the process is on its way out
                loop.call_soon_threadsafe(reports.put_nowait, report)

        def ended(done: asyncio.Future[None]) -> None:
            # State first, words last: nobody may wait for ever because a log line could not be written.
            self._session = None
            self._session_over.set()
            error = None if done.cancelled() else done.exception()
            if error is not None:
                self.crashed.set()
            reports.put_nowait(None)
            if isinstance(error, EngineError):
                log.error("the engine failed", reason=str(error))
            elif error is not None:
                log.error("the engine failed", exc_info=error)
            log.info("session closed")

        session = Session(engine, emit)
        self._session = session
        self._session_over.clear()
        log.info("session opened")
        self._thread.submit(session.run).add_done_callback(ended)
        return session


async def _read_orders(session: Session, context: RunContext) -> None:
    """Hand over the client's orders until it has no more. Raises InvalidOrders."""
    last = 0
    while isinstance(message := await context.read(), pb.Orders):
        if message.number != last + 1:
            raise InvalidOrders(f"orders {message.number} came after orders {last}")
        last = message.number
        session.order(orders_from_pb(message))
    session.end()
