"""SummedOverview: the figures of all HTTP workers and of the scheduler process, added up in that process."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from text_generation_router.errors import ServingError
from text_generation_router.front.questions import Answerers, LinkLost
from text_generation_router.front.server import WorkerSession
from text_generation_router.metrics import Metrics
from text_generation_router.overview import OwnOverview
from text_generation_router.overview.wire import COUNTS, METRICS, SAMPLE, TIME, sample_to_bytes
from text_generation_router.shards.cluster import Cluster

ANSWER_S = 1.0
"""Seconds for a worker to send its counts. A later one is shown with its last ones."""
COLLECT_EVERY_S = 1.0
"""Seconds between two collections without a reader: counts after the last one are lost with a worker that dies."""


class SummedOverview(OwnOverview):
    """Asks the workers for their counts."""

    def __init__(
        self, metrics: Metrics, cluster: Cluster[Any], sessions: Mapping[int, WorkerSession], workers: int
    ) -> None:
        """`sessions` are those of the workers that are connected, by number; there are to be `workers`."""
        super().__init__(metrics, cluster)
        self._workers = workers
        self._complete = False
        """True if all workers were connected, or were waited for."""
        self._sums = metrics.worker_sums()
        self._sessions = sessions
        self._late: set[asyncio.Task[None]] = set()
        """Questions to workers that did not answer in time; the workers are not asked again meanwhile."""
        self._known: dict[int, WorkerSession] = {}
        """The sessions at the last collection."""

    @property
    def answerers(self) -> Answerers:
        """The answers to questions of workers."""
        return {METRICS: self._answer_metrics, SAMPLE: self._answer_sample}

    async def run(self) -> None:
        """Collect the counts of workers from time to time, until cancelled."""
        while True:
            await asyncio.sleep(COLLECT_EVERY_S)
            await self.collect()

    async def collect(self) -> None:
        if not self._complete:  # a process that was started again must not show fewer counts than the one before
            await self._wait_for_workers()
        sessions = dict(self._sessions)
        for worker in self._known.keys() - sessions.keys():
            self._sums.lost(worker)
        self._known = sessions
        loop = asyncio.get_running_loop()
        late = {task.get_name() for task in self._late}
        asked = [
            loop.create_task(self._ask(worker, session), name=name)
            for worker, session in sessions.items()
            if (name := f"counts {id(session)}") not in late
        ]
        if asked:
            _, unanswered = await asyncio.wait(asked, timeout=ANSWER_S)
            for task in unanswered:
                self._late.add(task)
                task.add_done_callback(self._late.discard)

    async def _wait_for_workers(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(ANSWER_S):
                while len(self._sessions) < self._workers:  # noqa: ASYNC110 - once, and for a moment
                    await asyncio.sleep(ANSWER_S / 50)
        self._complete = True

    async def _ask(self, worker: int, session: WorkerSession) -> None:
        with suppress(LinkLost, ServingError):
            self._sums.update(worker, await session.questions.ask(COUNTS))

    async def _answer_metrics(self, body: bytes) -> bytes:
        return await self.metrics(openmetrics=bool(body))

    async def _answer_sample(self, body: bytes) -> bytes:
        return sample_to_bytes(await self.sample_after(*TIME.unpack(body)))
