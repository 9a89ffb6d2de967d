"""The feed of the dashboard: one sample a second for all viewers, and none without a viewer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from text_generation_router.dashboard.state import Sample

PERIOD_S = 1.0
"""Seconds between two samples."""


class Viewer(Protocol):
    """Gets every sample until it is closed."""

    def show(self, sample: Sample) -> None:
        """Take a sample; must neither block nor raise."""
        ...

    def close(self) -> None:
        """Take no more: the server drains."""
        ...


class Feed:
    """Takes samples while there are viewers. All of them get the same one."""

    def __init__(self, read: Callable[[], Sample], draining: Callable[[], bool], period_s: float = PERIOD_S) -> None:
        """`draining`: true when the server stops, so that no viewer holds it up."""
        self._read = read
        self._draining = draining
        self._period_s = period_s
        self._viewers: dict[Viewer, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    @contextmanager
    def watched_by(self, viewer: Viewer) -> Iterator[None]:
        """Show samples to `viewer` inside the block, the first one at once."""
        viewer.show(self._read())
        self._viewers[viewer] = None
        if self._timer is None:
            self._schedule()
        try:
            yield
        finally:
            del self._viewers[viewer]
            if not self._viewers and self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def _schedule(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._period_s, self._tick)

    def _tick(self) -> None:
        self._schedule()
        if self._draining():
            for viewer in self._viewers:
                viewer.close()
            return
        sample = self._read()
        for viewer in self._viewers:
            viewer.show(sample)
