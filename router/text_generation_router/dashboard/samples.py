"""Samples of the server's state, which all viewers share: one a second at most."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from text_generation_router.dashboard.state import Sample

PERIOD_S = 1.0
"""Seconds between two samples."""


class Samples:
    """Takes samples when they are asked for. All who ask get the same ones."""

    def __init__(self, read: Callable[[], Awaitable[Sample]], period_s: float = PERIOD_S) -> None:
        self._read = read
        self._period_s = period_s
        self._last: Sample | None = None
        self._taking = asyncio.Lock()

    async def after(self, at: float) -> Sample:
        """Return a sample that was taken after `at`: the last one, or the next if that is too old."""
        async with self._taking:
            last = self._last
            age = self._period_s if last is None else time.monotonic() - last.at
            if last is None or last.at <= at or age >= self._period_s:
                await asyncio.sleep(max(0.0, self._period_s - age))
                last = self._last = await self._read()
            return last
