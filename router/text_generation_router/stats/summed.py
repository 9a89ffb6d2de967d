"""SummedStats: the figures of all HTTP workers and of the scheduler process, added up in that process."""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from text_generation_router.errors import ServingError
from text_generation_router.metrics import Metrics
from text_generation_router.metrics.snapshots import WorkerSums
from text_generation_router.shards.cluster import Cluster
from text_generation_router.stats import COUNTS, HISTORY, METRICS, SAMPLE, OwnStats, packed
from text_generation_router.worker_link.rpc import Handlers, LinkLost
from text_generation_router.worker_link.server import WorkerConnection

ANSWER_S = 1.0
"""Seconds for a worker to send its counts. A later one is shown with its last ones."""


class SummedStats(OwnStats):
    """The figures of this process, with those of the workers, which it asks."""

    def __init__(self, metrics: Metrics, cluster: Cluster[Any], connections: Mapping[int, WorkerConnection]) -> None:
        """`connections` are those of the workers that are connected, by number."""
        super().__init__(metrics, cluster)
        self._sums = WorkerSums(metrics.registry, metrics.requests, metrics.errors)
        self._connections = connections
        self._late: dict[asyncio.Task[None], WorkerConnection] = {}
        """Calls to workers that did not answer in time: these are not called again meanwhile."""
        self._known: dict[int, WorkerConnection] = {}
        """The connections at the last collection."""

    @property
    def handlers(self) -> Handlers:
        return {
            METRICS: lambda openmetrics: self.metrics(openmetrics=openmetrics),
            SAMPLE: lambda at: packed(self.sample_after(at)),
            HISTORY: lambda: packed(self.history()),
        }

    async def collect(self) -> None:
        connections = dict(self._connections)
        for worker in self._known.keys() - connections.keys():
            self._sums.lost(worker)
        for worker in self._known.keys() | connections.keys():
            if self._known and connections.get(worker) is not self._known.get(worker):
                kind, text = ("back", "serves") if worker in connections else ("lost", "lost")
                self.state.events.add(kind, f"HTTP worker {worker} {text}")
        self._known = connections
        loop = asyncio.get_running_loop()
        asked = {
            loop.create_task(self._ask(worker, connection)): connection
            for worker, connection in connections.items()
            if connection not in self._late.values()
        }
        if asked:
            _, unanswered = await asyncio.wait(asked, timeout=ANSWER_S)
            for task in unanswered:
                self._late[task] = asked[task]
                task.add_done_callback(self._late.pop)

    async def _ask(self, worker: int, connection: WorkerConnection) -> None:
        with suppress(LinkLost, ServingError):
            counts = await connection.rpc.call(COUNTS)
            try:
                self._sums.update(worker, counts)
            except Exception as error:  # noqa: BLE001 - malformed counts can raise anything
                connection.link.cut_off(f"malformed counts: {error!r}")
