"""Start the processes of a plan, shards first, then the router; stop them in reverse order.

    launch (launch.py)
    └─ TaskGroup          the server · the stop request
       └─ TaskGroup       one task per replica (shard_restarts.py)
          └─ (all shards serve)
             └─ TaskGroup the router

The inner group is left first: the router drains while its shards still serve, and a shard that dies in that time is still
restarted. An error that ends serving is raised by a task, and the groups cancel the other tasks, inner ones first.
"""

from __future__ import annotations

import asyncio
import signal
import time
from contextlib import closing, suppress

import aiohttp
import structlog

from text_generation_launcher.child import ChildFailed, ChildLost, run_to_end
from text_generation_launcher.plan import ChildSpec, LaunchPlan
from text_generation_launcher.shard_group import RunShard
from text_generation_launcher.shard_restarts import ReplicaSupervisor, RestartPolicy
from text_generation_launcher.shutdown import GracefulShutdown
from text_generation_proto.descriptors import DescriptorReserve
from text_generation_proto.exit_codes import exit_fields
from text_generation_proto.notify import Notifier

RESERVED_DESCRIPTORS = 10
"""Descriptors that are kept for the end and the restart of a shard: two pipes, the search for orphans, subprocess's own."""
HEALTH_INTERVAL = 0.05
"""Seconds between two requests to the router's health route. There is no event for "the port is open now"."""

log = structlog.get_logger()


class Supervisor:
    """Runs a plan until cancelled, until its router ends, or until its shards are hopeless."""

    def __init__(
        self,
        plan: LaunchPlan,
        stop: GracefulShutdown,
        restarts: RestartPolicy,
        notifier: Notifier,
        run_shard: RunShard = run_to_end,
        *,
        json_output: bool,
    ) -> None:
        self._plan = plan
        self._notifier = notifier
        self._stop = stop
        self._json_output = json_output
        self.ready = asyncio.Event()
        self._reserve = DescriptorReserve(RESERVED_DESCRIPTORS)
        self._replicas = ReplicaSupervisor(
            plan.groups, stop, restarts, self.ready, self._reserve, run_shard, json_output=json_output
        )

    async def run(self) -> None:
        """Run the plan. Raises ChildFailed, ChildLost or ShardsHopeless in an exception group; never returns."""
        with closing(self._reserve):
            await self._run()

    async def _run(self) -> None:
        begin = time.monotonic()
        self._notifier.show(self._status)
        async with asyncio.TaskGroup() as shard_tasks:
            self._replicas.start(shard_tasks)
            await self._replicas.wait_until_serving()
            loaded = time.monotonic()
            if self._plan.shards:
                log.info("shards serve", shards=len(self._plan.shards), seconds=round(loaded - begin, 2))
            if self._plan.router is None:
                self.ready.set()
                self._notifier.ready()
                log.info("ready", shards_seconds=round(loaded - begin, 2))
                return
            async with asyncio.TaskGroup() as router_tasks:
                router_tasks.create_task(self._run_router(self._plan.router))
                await wait_until_up(self._plan.url, alone=not self._plan.shards)
                self.ready.set()
                self._notifier.ready()
                now = time.monotonic()
                log.info(
                    "ready",
                    url=self._plan.url,
                    listening_on=self._plan.host,
                    shards_seconds=round(loaded - begin, 2),
                    router_seconds=round(now - loaded, 2),
                )

    def _status(self) -> str:
        """Return the status for the service manager."""
        if self._stop.requested.is_set():
            return "draining"
        if not self._plan.groups:
            return "the router serves" if self.ready.is_set() else "the router waits for a shard"
        replicas = f"{self._replicas.serving} of {len(self._plan.groups)} replicas"
        return f"serving with {replicas}" if self.ready.is_set() else f"loading: {replicas} serve"

    async def _run_router(self, router: ChildSpec) -> None:
        code = await run_to_end(
            router,
            self._stop.grace_period,
            json_output=self._json_output,
            beside=self._forward_hangups,
        )
        if not self.ready.is_set():
            log.error("router failed to start", **exit_fields(code))
            raise ChildFailed(router.name)
        log.error("router died", **exit_fields(code))
        raise ChildLost(router.name)

    async def _forward_hangups(self, router: asyncio.subprocess.Process) -> None:
        await self.ready.wait()  # a router that starts has no handler yet
        while True:
            await self._stop.reload.wait()
            self._stop.reload.clear()
            with suppress(ProcessLookupError):
                router.send_signal(signal.SIGHUP)


async def wait_until_up(url: str, *, alone: bool) -> None:
    """Return once the router answers: its health route with 200, or, if the shards are not ours, /info without 503.

    A router alone may be on standby: other routers drive all shards.
    """
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as session:
        while True:
            with suppress(aiohttp.ClientError, TimeoutError):
                async with session.get(f"{url}/info" if alone else f"{url}/health") as response:
                    if response.status != 503 if alone else response.status == 200:
                        return
            await asyncio.sleep(HEALTH_INTERVAL)
