"""Samples of the server's state, one a second, which all viewers share.

StateKeeper ──► Samples, of the server ──► Feed of each process ──► its viewers
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from text_generation_common.log import log
from text_generation_router.dashboard.state import Sample
from text_generation_router.errors import ServingError

PERIOD_S = 1.0
"""Seconds between two samples."""


Viewer = Callable[[Sample | None], None]
"""Takes every sample, then None when the server drains; must neither block nor raise."""


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


class Feed:
    """Gets samples while there are viewers. All of them get the same one."""

    def __init__(self, sample_after: Callable[[float], Awaitable[Sample]], draining: Callable[[], bool]) -> None:
        """`sample_after` waits for a sample that is younger than a time. `draining`: true when the server stops, so that
        no viewer holds it up."""
        self._sample_after = sample_after
        self._draining = draining
        self._viewers: dict[Viewer, None] = {}
        """In order of arrival."""
        self._last: Sample | None = None
        self._running: asyncio.Task[None] | None = None

    @contextmanager
    def watched_by(self, viewer: Viewer) -> Iterator[None]:
        """Show samples to `viewer` inside the block, the first one at once."""
        self._viewers[viewer] = None
        if self._running is None:
            self._running = asyncio.get_running_loop().create_task(self._run())
        elif self._last is not None:
            viewer(self._last)
        try:
            yield
        finally:
            del self._viewers[viewer]
            if not self._viewers:
                self._running.cancel()
                self._running = self._last = None

    async def _run(self) -> None:
        at = 0.0
        while not self._draining():
            try:
                # A scheduler process that hangs must not keep the viewers of a process that drains.
                async with asyncio.timeout(3 * PERIOD_S):
                    sample = await self._sample_after(at)
            except TimeoutError:
                continue
            except ServingError:  # the scheduler process is away
                await asyncio.sleep(PERIOD_S)
                continue
            self._last, at = sample, sample.at
            for viewer in self._viewers:
                viewer(sample)
        for viewer in self._viewers:
            viewer(None)
