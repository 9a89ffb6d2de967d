"""Watch the processes of a plan: shards first, then the router; stopped in order, whatever ends them.

    launch (launch.py)
    └─ TaskGroup          the work · the wish to stop
       └─ TaskGroup       one task a shard
          └─ (all shards serve)
             └─ TaskGroup the router

Nesting is the order of stopping: the inner group is left first, so the router drains while its shards still serve. A
child that ends by itself raises out of its task, and the groups cancel the rest, inner ones first.
"""

from __future__ import annotations

import asyncio
import signal
import time

import structlog

from text_generation_launcher.child import run_to_end
from text_generation_launcher.plan import ChildSpec, Plan, ShardSpec
from text_generation_launcher.readiness import router_healthy, shard_serving
from text_generation_launcher.stop import StopSignals
from text_generation_proto.process import remove_socket, socket_path

log = structlog.get_logger()


class ChildFailed(Exception):
    """A shard or the router ended before everything was ready."""


class ChildLost(Exception):
    """A shard or the router ended by itself while serving."""


class Supervisor:
    """Runs a plan until cancelled, or until one of its processes ends."""

    def __init__(self, plan: Plan, stop: StopSignals, *, json_output: bool) -> None:
        self._plan = plan
        self._stop = stop
        self._json_output = json_output
        self.ready = asyncio.Event()

    async def run(self) -> None:
        """Raises ChildFailed or ChildLost, in an exception group; never returns by itself."""
        begin = time.monotonic()
        async with asyncio.TaskGroup() as shards:
            for shard in self._plan.shards:
                shards.create_task(self._run_shard(shard))
            async with asyncio.TaskGroup() as loading:
                for shard in self._plan.shards:
                    loading.create_task(shard_serving(shard.address))
            loaded = time.monotonic()
            log.info("shards serve", shards=len(self._plan.shards), seconds=round(loaded - begin, 2))
            async with asyncio.TaskGroup() as front:
                front.create_task(self._run(self._plan.router))
                await router_healthy(self._plan.url)
                self.ready.set()
                now = time.monotonic()
                log.info(
                    "ready",
                    url=self._plan.url,
                    listening_on=self._plan.host,
                    shards_seconds=round(loaded - begin, 2),
                    router_seconds=round(now - loaded, 2),
                )

    async def _run_shard(self, shard: ShardSpec) -> None:
        try:
            await self._run(shard)
        finally:
            if path := socket_path(shard.address):  # a shard that was killed could not do this itself
                remove_socket(path)

    async def _run(self, child: ChildSpec) -> None:
        code = await run_to_end(child, self._stop, json_output=self._json_output)
        ending = {"exit_code": code} if code >= 0 else {"exit_code": code, "signal": signal.Signals(-code).name}
        match child, self.ready.is_set():
            case ShardSpec(rank=rank), False:
                log.error("shard failed to start", rank=rank, **ending)
            case ShardSpec(rank=rank), True:
                log.error("shard died", rank=rank, **ending)
            case _, False:
                log.error("router failed to start", **ending)
            case _, True:
                log.error("router died", **ending)
        raise ChildLost(child.name) if self.ready.is_set() else ChildFailed(child.name)
