"""Samples of the server's state, one a second, which all viewers share."""

import asyncio
from collections.abc import Awaitable, Callable

from text_generation_common.log import log
from text_generation_router.dashboard.state import Sample

PERIOD_S = 1.0
"""Seconds between two samples."""


class Samples:
    """Takes samples. All who ask get the same ones."""

    def __init__(self, read: Callable[[], Awaitable[Sample]], period_s: float = PERIOD_S) -> None:
        self._read = read
        self._period_s = period_s
        self._last: Sample | None = None
        self._taken = asyncio.Event()
        """Set with the next sample."""

    async def run(self) -> None:
        """Take samples until cancelled."""
        while True:
            try:
                self._last = await self._read()
            except Exception:  # the dashboard must not end the server
                log.exception("no sample for the dashboard")
            else:
                self._taken.set()
                self._taken = asyncio.Event()
            await asyncio.sleep(self._period_s)

    async def after(self, at: float) -> Sample:
        """Return a sample that was taken after `at`: the last one, or the next if that is too old."""
        while (last := self._last) is None or last.at <= at:
            await self._taken.wait()
        return last
