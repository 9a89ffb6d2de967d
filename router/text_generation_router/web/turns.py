"""Turns of short work: a burst of requests is spread over iterations of the event loop.

The event loop runs everything that is ready before it looks at its sockets again. Two thousand requests that arrive at once
would hold up all running streams for a second or two.
"""

import asyncio
from collections import deque

AT_ONCE = 4
"""Pieces of work that begin in one iteration: a millisecond or two."""


class Turns:
    """Lets AT_ONCE pieces of work begin in each iteration of the event loop, in order."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._begun = 0
        """Pieces that began in this iteration."""

    async def take(self) -> None:
        """Wait until a piece of work may begin."""
        loop = asyncio.get_running_loop()
        if not self._begun:
            loop.call_soon(self._next)
        if self._begun < AT_ONCE:
            self._begun += 1
            return
        self._waiting.append(loop.create_future())
        await self._waiting[-1]

    def _next(self) -> None:
        self._begun = 0
        while self._waiting and self._begun < AT_ONCE:
            turn = self._waiting.popleft()
            if not turn.done():  # it may be cancelled
                turn.set_result(None)
                self._begun += 1
        if self._begun:
            asyncio.get_running_loop().call_soon(self._next)
