"""The queue between the engine's thread and one reader, and the callback that wakes all readers of an iteration at once."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterable
from typing import Any

log = logging.getLogger(__name__)


class AsyncQueue:
    """Items for a reader on the running event loop. `items` may be extended from any thread; then call `wake_readers`."""

    __slots__ = ("_waiter", "items", "loop")

    def __init__(self) -> None:
        self.items: deque[Any] = deque()
        self.loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None

    def wake(self) -> None:
        """Wake the reader. Called on the loop."""
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def get(self, timeout: float) -> Any:  # noqa: ANN401 - the library's queues are not typed either
        """Return the next item. Raises TimeoutError; asyncio.QueueEmpty if `timeout` is not positive."""
        if timeout <= 0 and not self.items:
            raise asyncio.QueueEmpty
        while not self.items:
            await asyncio.wait_for(self.arrival(), timeout)
        return self.items.popleft()

    def arrival(self) -> asyncio.Future[None]:
        """Return a future for the next wake-up."""
        self._waiter = self.loop.create_future()
        return self._waiter


def wake_readers(queues: Iterable[AsyncQueue]) -> None:
    """Wake the readers of `queues` by one callback on the loop of the first. May be called from any thread.

    proxy.py assumes that all loops of a process are the same: it notifies all queues on the first one's loop. Readers on another
    loop are never woken here.
    """
    queues = list(queues)
    if not queues:
        return
    loop = queues[0].loop
    try:
        loop.call_soon_threadsafe(_wake, queues, loop)
    except RuntimeError:
        # proxy.py, EventLoopShutdownError: the items stay where they are.
        log.warning("the event loop of the readers is closed")


def _wake(queues: list[AsyncQueue], loop: asyncio.AbstractEventLoop) -> None:
    for queue in queues:
        if queue.loop is loop:
            queue.wake()
