"""SharedCounts: numbers that each HTTP worker writes and all of them read, in memory that they share.

So each worker can apply a limit of the whole server without a message. The row of a worker that died counts until it is
started again.
"""

from __future__ import annotations

import mmap
import os
from enum import IntEnum


class SharedCount(IntEnum):
    """The columns."""

    CONNECTIONS = 0
    REPLACEABLE = 1
    """Connections that may be closed to make room."""
    MANAGEMENT_CONNECTIONS = 2
    REPLACEABLE_MANAGEMENT = 3


class SharedCounts:
    """The rows of all workers, of which this process writes one."""

    def __init__(self, memory_fd: int, worker: int, workers: int) -> None:
        """`memory_fd` is a memfd that all workers inherit. Raises OSError."""
        size = 8 * len(SharedCount) * workers
        os.ftruncate(memory_fd, size)
        self._numbers = memoryview(mmap.mmap(memory_fd, size)).cast("Q")
        self._first = worker * len(SharedCount)
        for count in SharedCount:
            self.set(count, 0)

    def set(self, count: SharedCount, value: int) -> None:
        """Write a number of this worker."""
        self._numbers[self._first + count] = value

    def elsewhere(self, count: SharedCount) -> int:
        """Return the sum over the other workers."""
        return sum(self._numbers[count :: len(SharedCount)]) - self._numbers[self._first + count]
