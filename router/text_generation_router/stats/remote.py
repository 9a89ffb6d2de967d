"""RemoteStats: the figures of the whole server as an HTTP worker gets them, from the scheduler process."""

import asyncio

from text_generation_router.dashboard.state import Sample
from text_generation_router.stats import HISTORY, METRICS, SAMPLE, unpacked
from text_generation_router.worker_link.scheduler_link import SchedulerLink

MAX_SCRAPES = 4
"""Scrapes that wait for an answer; further ones wait for these."""


class RemoteStats:
    """Asks the scheduler process; a Stats."""

    def __init__(self, link: SchedulerLink) -> None:
        self._link = link
        self._scrapes = asyncio.Semaphore(MAX_SCRAPES)
        self._samples: dict[float, asyncio.Task[Sample]] = {}
        """The calls for samples that run, by their arguments."""

    async def metrics(self, *, openmetrics: bool) -> bytes:
        async with self._scrapes:
            return await self._link.call(METRICS, openmetrics)

    async def sample_after(self, at: float) -> Sample:
        if (asked := self._samples.get(at)) is None:
            asked = asyncio.get_running_loop().create_task(unpacked(self._link.call(SAMPLE, at)))
            self._samples[at] = asked  # all viewers who had the last sample ask for the same one
            asked.add_done_callback(lambda _: self._samples.pop(at))
        return await asyncio.shield(asked)

    async def history(self) -> Sample:
        return await unpacked(self._link.call(HISTORY))
