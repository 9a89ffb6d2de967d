"""The Shard service, whose one session may be lent to the gateway: one of the two drives the engine, never both.

The gateway keeps its session while it has nothing to do, and gives it up as soon as a router comes. A router's lasts as long as
the router.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc
import structlog

from text_generation_shard.engine import Engine, EngineError, WarmUpLimits
from text_generation_shard.gateway.errors import CallFailed
from text_generation_shard.servicer import EngineThread, ShardServicer
from text_generation_shard.session import Report, Session

log = structlog.get_logger()


class HostServicer(ShardServicer):
    """A ShardServicer that serves a gateway in the same process as well."""

    def __init__(self, thread: EngineThread, rank: int, world_size: int) -> None:
        super().__init__(thread, rank, world_size)
        self._lent: Session | None = None
        """The session that was lent last."""
        self._yield: Callable[[], None] = lambda: None
        """Asks whoever has it to end it."""
        self._warming: asyncio.Future[int] | None = None
        self._warm_up_problem: str | None = None
        self._stopping = False

    @property
    def engine(self) -> Engine | None:
        """The engine, once it is loaded."""
        return self._engine

    @property
    def problem(self) -> CallFailed | None:
        """Why nothing can be generated now; None if nothing speaks against it."""
        if self._stopping:
            return CallFailed(grpc.StatusCode.UNAVAILABLE, "the shard is stopping")
        if self.crashed.is_set():
            return CallFailed(grpc.StatusCode.INTERNAL, "the engine failed")
        if self._engine is None:
            return CallFailed(grpc.StatusCode.UNAVAILABLE, "the model is loading")
        if self._warm_up_problem is not None and not self._num_blocks:
            return CallFailed(grpc.StatusCode.INTERNAL, self._warm_up_problem)
        if self._session is not None and self._session is not self._lent and not self._session.ending:
            return CallFailed(
                grpc.StatusCode.FAILED_PRECONDITION, "a router drives this shard: its Run session is open"
            )
        return None

    def stop_lending(self) -> None:
        """The shard is on its way out: no session is lent any more."""
        self._stopping = True

    async def warm_up(self) -> None:
        """Warm the engine up, unless somebody did. Tried again if it failed before. Raises CallFailed."""
        if self._warming is None:
            self._warm_up_problem = None
            if (problem := self.problem) is not None:
                raise problem
            if self._num_blocks:
                return
            assert self._engine is not None
            log.info("warming up for the gateway")
            self._warming = self._thread.submit(self._engine.warm_up, WarmUpLimits())
            self._warming.add_done_callback(self._warmed)
        # It goes on for the others, should the call that began it be cancelled.
        await asyncio.wait((self._warming,))
        if (problem := self.problem) is not None:
            raise problem

    async def lend_session(self, tell: Callable[[Report | None], None], yield_engine: Callable[[], None]) -> Session:
        """A session on the warm engine; `tell` gets its reports, and None when it is over. `yield_engine` is called when
        somebody else wants it: it may be ended then. Raises CallFailed."""
        if not await self._session_ended():
            raise _taken()
        if (problem := self.problem) is not None:
            raise problem
        assert self._engine is not None
        self._lent, self._yield = self._open_session(self._engine, _Told(tell)), yield_engine
        return self._lent

    async def _session_ended(self) -> bool:
        self._yield()
        return await super()._session_ended()

    def _warmed(self, warming: asyncio.Future[int]) -> None:
        self._warming = None
        try:
            num_blocks = warming.result()
        except EngineError as error:
            self._warm_up_problem = str(error)
        except (asyncio.CancelledError, Exception) as error:
            self._warm_up_problem = "the engine failed to warm up"
            log.error("the engine failed to warm up", exc_info=error)
        else:
            self._num_blocks = num_blocks
            self._warm_up_problem = "the KV pool is smaller than a block" if num_blocks < 1 else None
            log.info("warmed up", kv_blocks=num_blocks)


def _taken() -> CallFailed:
    return CallFailed(grpc.StatusCode.FAILED_PRECONDITION, "a router drives this shard: its Run session is open")


class _Told(asyncio.Queue[Report | None]):
    """A queue at which nobody waits: what is put in is told at once."""

    def __init__(self, tell: Callable[[Report | None], None]) -> None:
        super().__init__()
        self._tell = tell

    def put_nowait(self, item: Report | None) -> None:
        self._tell(item)
