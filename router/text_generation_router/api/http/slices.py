"""Slices: a burst of new work, done a few pieces at a time.

The event loop runs everything that is ready before it looks at its sockets again. Two thousand requests that arrive at once
would hold up all running streams for a second, so only a few of them begin in one iteration of the loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial

AT_ONCE = 4
"""Pieces of work that begin in one iteration: a millisecond or two."""


class Slices:
    """Turns of short work: at once, or in order in later iterations of the event loop."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._begun = 0
        """Pieces that began in this iteration."""

    def begin(self) -> bool:
        """Return True if a piece of work may be done now; else it has to `wait`."""
        if self._waiting or self._begun == AT_ONCE:
            return False
        if not self._begun:
            asyncio.get_running_loop().call_soon(self._next)
        self._begun += 1
        return True

    def wait(self, work: Callable[[], None]) -> None:
        """Do a piece of work in a later iteration, after all that wait already."""
        self._waiting.append(work)

    async def turn(self) -> None:
        """Wait until a piece of work may be done."""
        if not self.begin():
            granted = asyncio.get_running_loop().create_future()
            self.wait(partial(_grant, granted))
            await granted

    def _next(self) -> None:
        self._begun = min(len(self._waiting), AT_ONCE)
        if self._begun:
            asyncio.get_running_loop().call_soon(self._next)
        for _ in range(self._begun):
            self._waiting.popleft()()


def _grant(turn: asyncio.Future[None]) -> None:
    if not turn.done():  # it may be cancelled
        turn.set_result(None)
