"""The figures of the whole server, whichever HTTP worker shows them: /metrics and the samples of the dashboard.

one process          OwnStats
HTTP worker          RemoteStats ── calls ──► scheduler process: SummedStats
                     counts of the worker ◄── calls ──┘
"""

import asyncio
import marshal
from collections.abc import Awaitable
from dataclasses import astuple
from typing import Any, Protocol

from text_generation_common.log import log
from text_generation_router.dashboard.state import Sample, StateKeeper
from text_generation_router.metrics import Metrics
from text_generation_router.shards.cluster import Cluster

COUNTS, METRICS, SAMPLE, HISTORY = "counts", "metrics", "sample", "history"
"""Methods: the snapshot of a worker; /metrics; a sample of the dashboard that is younger than a time; its last hour."""
PERIOD_S = 1.0
"""Seconds between two samples."""


class Stats(Protocol):
    async def metrics(self, *, openmetrics: bool) -> bytes:
        """Return every metric in Prometheus' text format, or in OpenMetrics'. Raises Unhealthy."""

    async def sample_after(self, at: float) -> Sample:
        """Return a sample of the state that was taken after `at`, a time of the monotonic clock. Raises Unhealthy."""

    async def history(self) -> Sample:
        """Return the last hour. Raises Unhealthy."""


class OwnStats:
    """The figures of a router of one process; a Stats."""

    def __init__(self, metrics: Metrics, cluster: Cluster[Any], period_s: float = PERIOD_S) -> None:
        self._metrics = metrics
        self._period_s = period_s
        self._last: Sample | None = None
        self._taken = asyncio.Event()
        """Set with the next sample."""
        self.state = StateKeeper(metrics, cluster)
        self.state.events.add("started", "The router started")

    async def metrics(self, *, openmetrics: bool) -> bytes:
        await self.collect()
        return await self._metrics.written(openmetrics=openmetrics)

    async def sample_after(self, at: float) -> Sample:
        while (last := self._last) is None or last.at <= at:
            await self._taken.wait()
        return last

    async def history(self) -> Sample:
        await self.sample_after(0.0)
        return self.state.history()

    async def run(self) -> None:
        """Take samples, which all viewers share, until cancelled."""
        while True:
            try:
                await self.collect()
                self._last = self.state.sample()
            except Exception:  # the dashboard must not end the server
                log.exception("no sample for the dashboard")
            else:
                self._taken.set()
                self._taken = asyncio.Event()
            await asyncio.sleep(self._period_s)

    async def collect(self) -> None:
        """Bring the metrics up to date. Here all are counted in this process: nothing to do."""


async def packed(sample: Awaitable[Sample]) -> bytes:
    return marshal.dumps(astuple(await sample))


async def unpacked(reply: Awaitable[bytes]) -> Sample:
    return Sample(*marshal.loads(await reply))
