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
from text_generation_router.metrics.kept import KeptBytes
from text_generation_router.overview import OwnOverview
from text_generation_router.overview.wire import COUNTS, HISTORY, METRICS, SAMPLE, TIME, sample_to_bytes
from text_generation_router.shards.cluster import Cluster

ANSWER_S = 1.0
"""Seconds for a worker to send its counts. A later one is shown with its last ones."""


class SummedOverview(OwnOverview):
    """The figures of this process, with those of the workers, which it asks."""

    def __init__(
        self, metrics: Metrics, cluster: Cluster[Any], sessions: Mapping[int, WorkerSession], kept: KeptBytes
    ) -> None:
        """`sessions` are those of the workers that are connected, by number; `kept` are the counts that outlive this process."""
        counted = kept.read()
        super().__init__(metrics, cluster, restarted=bool(counted))
        self._kept = kept
        self._sums = metrics.worker_sums()
        if counted:
            self._sums.resume(counted)
        self._sessions = sessions
        self._late: dict[asyncio.Task[None], WorkerSession] = {}
        """Questions to workers that did not answer in time: they are not asked again meanwhile."""
        self._known: dict[int, WorkerSession] = {}
        """The sessions at the last collection."""

    @property
    def answerers(self) -> Answerers:
        """The answers to questions of workers."""
        return {METRICS: self._answer_metrics, SAMPLE: self._answer_sample, HISTORY: self._answer_history}

    async def collect(self) -> None:
        sessions = dict(self._sessions)
        for worker in self._known.keys() - sessions.keys():
            self._sums.lost(worker)
        for worker in self._known.keys() | sessions.keys():
            if self._known and sessions.get(worker) is not self._known.get(worker):
                kind, text = ("back", "serves") if worker in sessions else ("lost", "lost")
                self.state.events.add(kind, f"HTTP worker {worker} {text}")
        self._known = sessions
        loop = asyncio.get_running_loop()
        asked = {
            loop.create_task(self._ask(worker, session)): session
            for worker, session in sessions.items()
            if session not in self._late.values()
        }
        if asked:
            _, unanswered = await asyncio.wait(asked, timeout=ANSWER_S)
            for task in unanswered:
                self._late[task] = asked[task]
                task.add_done_callback(self._late.pop)
        self._kept.write(self._sums.counted())

    async def _ask(self, worker: int, session: WorkerSession) -> None:
        with suppress(LinkLost, ServingError):
            counts = await session.questions.ask(COUNTS)
            try:
                self._sums.update(worker, counts)
            except Exception as error:  # noqa: BLE001 - any sense that they do not make
                session.link.cut_off(f"counts that make no sense: {error!r}")

    async def _answer_metrics(self, body: bytes) -> bytes:
        return await self.metrics(openmetrics=bool(body))

    async def _answer_sample(self, body: bytes) -> bytes:
        return sample_to_bytes(await self.sample_after(*TIME.unpack(body)))

    async def _answer_history(self, body: bytes) -> bytes:
        return sample_to_bytes(await self.history())
