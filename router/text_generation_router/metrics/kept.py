"""KeptBytes: bytes in memory that outlives this process, for the next one in its place."""

from __future__ import annotations

import os
import struct

_HEAD = struct.Struct("=QQ")
"""Place and length of the bytes. Written in one piece, after them: a process that is killed leaves the former ones."""
_PLACES = 1 << 12, 1 << 32
"""Two places, used in turn."""


class KeptBytes:
    """The bytes that were written last. One process at a time has them."""

    def __init__(self, memory_fd: int) -> None:
        """`memory_fd` is a memfd that the launcher holds, too; -1: nothing outlives this process."""
        self._fd = os.memfd_create("kept") if memory_fd < 0 else memory_fd

    def read(self) -> bytes:
        """Return them; none before the first `write`."""
        at, length = self._head()
        return os.pread(self._fd, length, at)

    def write(self, body: bytes) -> None:
        """Replace them."""
        free = next(place for place in _PLACES if place != self._head()[0])
        os.pwrite(self._fd, body, free)
        os.pwrite(self._fd, _HEAD.pack(free, len(body)), 0)

    def _head(self) -> tuple[int, int]:
        at, length = _HEAD.unpack(os.pread(self._fd, _HEAD.size, 0).ljust(_HEAD.size, b"\0"))
        return at, length
