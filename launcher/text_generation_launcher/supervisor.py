"""Start the processes of a plan, shards first, then the router; stop them in reverse order.

    launch (launch.py)
    └─ TaskGroup             the server · the stop request
       └─ TaskGroup          one task per replica (shard_restarts.py)
          └─ (all shards serve)
             └─ TaskGroup    the router, or its scheduler process (router_restarts.py)
                └─ TaskGroup the HTTP workers

An inner group is left first: HTTP workers drain while the scheduler process and the shards still serve, and a process of an
outer group that dies in that time is still restarted. An error that ends serving is raised by a task, and the groups cancel
the other tasks, inner ones first.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import closing

import structlog

from text_generation_launcher.child import run_to_end
from text_generation_launcher.plan import LaunchPlan
from text_generation_launcher.restarts import RestartPolicy
from text_generation_launcher.router_restarts import supervise_router
from text_generation_launcher.shard_group import RunShard
from text_generation_launcher.shard_restarts import supervise_replicas
from text_generation_launcher.shutdown import GracefulShutdown
from text_generation_proto.descriptors import DescriptorReserve
from text_generation_proto.notify import Notifier

RESERVED_DESCRIPTORS = 10
"""Descriptors that are kept for the end and the restart of a child: two pipes, the search for orphans, subprocess's own."""

log = structlog.get_logger()


class Supervisor:
    """Runs a plan until cancelled, or until its router or its shards are not worth another restart."""

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
        self.ready = asyncio.Event()
        self._reserve = DescriptorReserve(RESERVED_DESCRIPTORS)
        self._replicas = supervise_replicas(
            plan.groups, stop, restarts, self._answers, self._reserve, run_shard, json_output=json_output
        )
        # The router or its scheduler process, and the HTTP workers, if there are some.
        self._first, self._workers = (
            supervise_router(specs, stop, restarts, self._answers, self._reserve, json_output=json_output)
            for specs in (plan.router[:1], plan.router[1:])
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

    def _status(self) -> str:
        """Return the status for the service manager."""
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
