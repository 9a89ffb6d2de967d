"""The queue between the engine's thread and one reader, and the burst that wakes all readers of an iteration at once."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Iterable
from queue import SimpleQueue
from typing import Any

from trtllm_standin.errors import MixedSyncAsyncAPIError

log = logging.getLogger(__name__)
SYNC_POLL_S = 0.01
"""How often a synchronous reader of an asynchronous queue looks (llmapi/utils.py)."""


class AsyncQueue:
    """Items for a reader on one event loop. `append` from any thread; the rest on the loop that made it."""

    __slots__ = ("_waiter", "append", "is_tainted", "items", "loop", "sync_q")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.items: deque[Any] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self.is_tainted = False
        """Whether somebody has read it synchronously."""
        self.append = self.items.append
        """Add an item and wake nobody: that is `wake_readers`' part."""
        self.loop = loop
        self.sync_q = SyncQueue(self)

    def wake(self) -> None:
        """Let the reader see what was appended. On the loop."""
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def get(self, timeout: float | None = None) -> Any:  # noqa: ANN401 - the library's queues are not typed either
        """The next item. Without patience (`timeout` ≤ 0) raises asyncio.QueueEmpty, else TimeoutError when it runs out."""
        if timeout is not None and timeout <= 0 and not self.items:
            raise asyncio.QueueEmpty
        while not self.items or self.is_tainted:
            await asyncio.wait_for(self.arrival(), timeout)
        return self.items.popleft()

    def arrival(self) -> asyncio.Future[None]:
        """What to await while there are no `items`: for a reader that every token passes through. Raises
        MixedSyncAsyncAPIError."""
        if self.is_tainted:
            raise MixedSyncAsyncAPIError
        self._waiter = self.loop.create_future()
        return self._waiter

    def get_sync(self, timeout: float | None) -> Any:  # noqa: ANN401 - see get
        """Busy-wait for the next item, after which nobody may await this queue. None, not Empty, when time runs out."""
        # llmapi/utils.py, _SyncQueue: it warns, blocks the loop's thread, and taints the queue.
        log.warning("reading an asynchronous result synchronously blocks the event loop")
        self.is_tainted = True
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self.items:
            if deadline is not None and time.monotonic() > deadline:
                return None
            time.sleep(SYNC_POLL_S)
        return self.items.popleft()


class SyncQueue:
    """The synchronous end of an AsyncQueue."""

    __slots__ = ("_queue",)

    def __init__(self, queue: AsyncQueue) -> None:
        self._queue = queue

    def put(self, item: object) -> None:
        """Add an item and wake the reader."""
        self._queue.append(item)
        wake_readers([self._queue])

    def get(self, timeout: float | None = None) -> Any:  # noqa: ANN401 - see AsyncQueue.get
        """See AsyncQueue.get_sync."""
        return self._queue.get_sync(timeout)


class ThreadQueue:
    """Items for a reader without an event loop."""

    __slots__ = ("_queue",)

    def __init__(self) -> None:
        self._queue: SimpleQueue[Any] = SimpleQueue()

    def append(self, item: object) -> None:
        """Add an item; the reader wakes by itself."""
        self._queue.put(item)

    def get(self, timeout: float | None = None) -> Any:  # noqa: ANN401 - see AsyncQueue.get
        """The next item. Raises queue.Empty when time runs out."""
        return self._queue.get(timeout=timeout)


AnyQueue = AsyncQueue | ThreadQueue


def running_loop() -> asyncio.AbstractEventLoop | None:
    """The loop that runs in this thread, if any: executor/utils.py, has_event_loop."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def make_queue() -> AnyQueue:
    """A queue for a reader on the loop that runs here, if one does; else for one without."""
    loop = running_loop()
    return ThreadQueue() if loop is None else AsyncQueue(loop)


def ends_of(queue: AnyQueue) -> tuple[AsyncQueue | None, SyncQueue | ThreadQueue]:
    """How it can be read: asynchronously, if at all, and synchronously."""
    return (queue, queue.sync_q) if isinstance(queue, AsyncQueue) else (None, queue)


def wake_readers(queues: Iterable[AsyncQueue]) -> None:
    """Wake the readers of `queues` by one callback on the loop of the first. From any thread.

    proxy.py takes it that all loops of one process are the same one: it notifies all queues on the first one's loop. A
    reader on another loop is then not woken in a way that its loop notices; here, never by this burst.
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
