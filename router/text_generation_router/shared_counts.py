"""SharedCounts: numbers that each HTTP worker counts and all of them read, in a file that they map into memory.

A limit of the whole server is so known to each worker at once, without a message. The row of a worker that died counts
until it is started again.
"""

from __future__ import annotations

import mmap
import os
from enum import IntEnum
from pathlib import Path


class SharedCount(IntEnum):
    """The columns."""

    CONNECTIONS = 0
    REPLACEABLE = 1
    """Connections that may be closed to make room."""
    MANAGEMENT_CONNECTIONS = 2
    REPLACEABLE_MANAGEMENT = 3


SIZE = 255 * len(SharedCount) * 8
"""Bytes of the file: eight for a number, for the most workers that there may be."""


class SharedCounts:
    """The rows of all workers, of which one is written here."""

    def __init__(self, path: Path, worker: int, workers: int) -> None:
        """Map the file; it is created if it does not exist. Raises OSError."""
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(file, SIZE)
            self._numbers = memoryview(mmap.mmap(file, SIZE)).cast("Q")
        finally:
            os.close(file)
        self._first, self._end = worker * len(SharedCount), workers * len(SharedCount)
        for count in SharedCount:
            self.set(count, 0)

    def set(self, count: SharedCount, value: int) -> None:
        """Change a number of this worker."""
        self._numbers[self._first + count] = value

    def elsewhere(self, count: SharedCount) -> int:
        """Return the sum over the other workers."""
        return sum(self._numbers[count : self._end : len(SharedCount)]) - self._numbers[self._first + count]
