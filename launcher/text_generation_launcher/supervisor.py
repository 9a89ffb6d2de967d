"""Start the processes of a plan, shards first, then the router; stop them in reverse order.

    launch (launch.py)
    └─ TaskGroup             the server · the stop request
       └─ TaskGroup          one task per replica (units.py)
          └─ (all shards serve)
             └─ TaskGroup    the router, or its scheduler process
                └─ TaskGroup the HTTP workers

An inner group is left first: HTTP workers drain while the scheduler process and the shards still serve, and a process of an
outer group that dies in that time is still restarted. An error that ends serving is raised by a task, and the groups cancel
the other tasks, inner ones first.
"""

import asyncio
import time
from contextlib import closing
from dataclasses import replace

from text_generation_common.descriptors import DescriptorReserve
from text_generation_common.exit_codes import ExitCode
from text_generation_common.log import log
from text_generation_common.notify import Notifier
from text_generation_launcher.child import run_to_end
from text_generation_launcher.plan import LaunchPlan
from text_generation_launcher.restarts import RestartPolicy, Restarts
from text_generation_launcher.shutdown import GracefulShutdown
from text_generation_launcher.units import ReplicaUnit, RouterUnit, RunShard

RESERVED_DESCRIPTORS = 10
"""Descriptors that are kept for the end and the restart of a child: two pipes, the search for orphans, subprocess's own."""


class Supervisor:
    """Runs a plan until cancelled, or until the router or all shards have reached the restart limit."""

    def __init__(
        self,
        plan: LaunchPlan,
        stop: GracefulShutdown,
        restarts: RestartPolicy,
        notifier: Notifier,
        run_shard: RunShard = run_to_end,
    ) -> None:
        self._plan = plan
        self._notifier = notifier
        self._stop = stop
        self.ready = asyncio.Event()
        self._reserve = DescriptorReserve(RESERVED_DESCRIPTORS)
        replicas = [ReplicaUnit(group, stop, self._reserve, run_shard) for group in plan.groups]
        self._replicas = Restarts(replicas, restarts, stop, self._answers, self._without_shards)
        # Any serving ends the streak: a start takes a second and no weights, and a request that kills the processes which run
        # it is given up after a few of them.
        of_router = replace(restarts, stable_after=0.0)
        # The router or its scheduler process, and the HTTP workers, if there are some.
        units = [RouterUnit(spec, stop, self._reserve) for spec in plan.router]
        self._first, self._workers = (
            Restarts(each, of_router, stop, self._answers, self._without_router) for each in (units[:1], units[1:])
        )
        self._max_restarts = restarts.max_restarts

    async def run(self) -> None:
        """Run the plan. Raises ServerEnded in an exception group; never returns."""
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
            async with asyncio.TaskGroup() as router_tasks:
                self._first.start(router_tasks)
                async with asyncio.TaskGroup() as worker_tasks:
                    self._workers.start(worker_tasks)
                    await self._first.wait_until_serving()
                    await self._workers.wait_until_serving()
                    self.ready.set()
                    self._notifier.ready()
                    fields: dict[str, object] = {"shards_seconds": round(loaded - begin, 2)}
                    if self._plan.router:
                        fields |= {
                            "url": self._plan.url,
                            "listening_on": self._plan.host,
                            "router_seconds": round(time.monotonic() - loaded, 2),
                        }
                    log.info("ready", **fields)

    def _answers(self) -> bool:
        """Return True once a process that listens for clients has served."""
        return (self._workers if len(self._workers) else self._first).has_served

    def _without_shards(self, _child: str) -> ExitCode:
        if self._max_restarts == 0:
            return ExitCode.DEPENDENCY_LOST
        log.error("giving up: no shard serves, and all have reached the restart limit", shards=len(self._replicas))
        return ExitCode.HOPELESS

    def _without_router(self, child: str) -> ExitCode:
        if self._max_restarts:
            log.error("giving up: restart limit of the router reached", child=child)
        return ExitCode.DEPENDENCY_LOST

    def _status(self) -> str:
        if self._stop.requested.is_set():
            return "draining"
        ready = self.ready.is_set()
        if not self._plan.groups:
            status = "the router serves" if ready else "the router waits for a shard"
        else:
            replicas = f"{self._replicas.serving} of {len(self._replicas)} replicas"
            status = f"serving with {replicas}" if ready else f"loading: {replicas} serve"
        processes = len(self._first) + len(self._workers)
        down = processes - self._first.serving - self._workers.serving
        return f"{status}, {down} of {processes} router processes restarting" if ready and down else status
