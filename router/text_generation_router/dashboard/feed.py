"""The feed of the dashboard: the samples for all viewers of this process, and none without a viewer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from text_generation_router.dashboard.samples import PERIOD_S
from text_generation_router.dashboard.state import Sample
from text_generation_router.errors import ServingError

Viewer = Callable[[Sample | None], None]
"""Takes every sample, then None when the server drains; must neither block nor raise."""


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
