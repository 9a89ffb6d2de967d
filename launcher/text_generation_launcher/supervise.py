"""Watch the processes of a plan: shards first, then the router; stopped in order, whatever ends them.

    launch (launch.py)
    └─ TaskGroup          the work · the wish to stop
       └─ TaskGroup       one task a replica: its shards (keeper.py)
          └─ (all shards serve)
             └─ TaskGroup the router

Nesting is the order of stopping: the inner group is left first, so the router drains while its shards still serve, and
while one that dies meanwhile is still restarted. What ends serving raises out of its task, and the groups cancel the
rest, inner ones first.
"""

from __future__ import annotations

import asyncio
import time

import structlog

from text_generation_launcher.child import run_to_end
from text_generation_launcher.endings import ChildFailed, ChildLost, ending
from text_generation_launcher.keeper import ShardKeeper
from text_generation_launcher.plan import Plan
from text_generation_launcher.readiness import router_healthy
from text_generation_launcher.restarts import RestartPolicy
from text_generation_launcher.stop import StopSignals

log = structlog.get_logger()


class Supervisor:
    """Runs a plan until cancelled, until its router ends, or until its shards are hopeless."""

    def __init__(self, plan: Plan, stop: StopSignals, restarts: RestartPolicy, *, json_output: bool) -> None:
        self._plan = plan
        self._stop = stop
        self._json_output = json_output
        self.ready = asyncio.Event()
        self._shards = ShardKeeper(plan.groups, stop, restarts, self.ready, json_output=json_output)

    async def run(self) -> None:
        """Raises ChildFailed, ChildLost or ShardsHopeless, in an exception group; never returns by itself."""
        begin = time.monotonic()
        async with asyncio.TaskGroup() as shards:
            self._shards.start(shards)
            await self._shards.serving()
            loaded = time.monotonic()
            log.info("shards serve", shards=len(self._plan.shards), seconds=round(loaded - begin, 2))
            async with asyncio.TaskGroup() as front:
                front.create_task(self._run_router())
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

    async def _run_router(self) -> None:
        code = await run_to_end(self._plan.router, self._stop, json_output=self._json_output)
        if not self.ready.is_set():
            log.error("router failed to start", **ending(code))
            raise ChildFailed(self._plan.router.name)
        log.error("router died", **ending(code))
        raise ChildLost(self._plan.router.name)
