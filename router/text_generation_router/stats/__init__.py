"""The figures of the whole server, whichever HTTP worker shows them: /metrics and the samples of the dashboard.

one process          OwnStats
HTTP worker          RemoteStats ── calls ──► scheduler process: SummedStats
                     counts of the worker ◄── calls ──┘
"""

import marshal
from collections.abc import Awaitable
from dataclasses import astuple
from typing import Any, Protocol

from text_generation_router.dashboard.samples import Samples
from text_generation_router.dashboard.state import Sample, StateKeeper
from text_generation_router.metrics import Metrics
from text_generation_router.shards.cluster import Cluster

COUNTS, METRICS, SAMPLE, HISTORY = "counts", "metrics", "sample", "history"
"""Methods: the snapshot of a worker; /metrics; a sample of the dashboard that is younger than a time; its last hour."""


class Stats(Protocol):
    async def metrics(self, *, openmetrics: bool) -> bytes:
        """Return every metric in Prometheus' text format, or in OpenMetrics'. Raises Unhealthy."""

    async def sample_after(self, at: float) -> Sample:
        """Return a sample of the state that was taken after `at`, a time of the monotonic clock. Raises Unhealthy."""

    async def history(self) -> Sample:
        """Return the last hour. Raises Unhealthy."""


class OwnStats:
    """The figures of a router of one process; a Stats."""

    def __init__(self, metrics: Metrics, cluster: Cluster[Any]) -> None:
        self._metrics = metrics
        self.state = StateKeeper(metrics, cluster)
        self.state.events.add("started", "The router started")
        self._samples = Samples(self._sample)

    async def metrics(self, *, openmetrics: bool) -> bytes:
        await self.collect()
        return await self._metrics.written(openmetrics=openmetrics)

    async def sample_after(self, at: float) -> Sample:
        return await self._samples.after(at)

    async def history(self) -> Sample:
        await self._samples.after(0.0)
        return self.state.history()

    async def run(self) -> None:
        """Take a sample every second, until cancelled."""
        await self._samples.run()

    async def collect(self) -> None:
        """Bring the metrics up to date. Here all are counted in this process: nothing to do."""

    async def _sample(self) -> Sample:
        await self.collect()
        return self.state.sample()


async def packed(sample: Awaitable[Sample]) -> bytes:
    return marshal.dumps(astuple(await sample))


async def unpacked(reply: Awaitable[bytes]) -> Sample:
    return Sample(*marshal.loads(await reply))
