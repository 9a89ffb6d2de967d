"""KeptBytes: bytes in memory that outlives this process, for the next one in its place."""

from __future__ import annotations

import os
import struct

import structlog

_HEAD = struct.Struct("=QQ")
"""Place and length of the bytes. Written in one piece, after them: a process that is killed leaves the former ones."""
_FIRST = 1 << 12
"""Lowest place. A low one, because a service manager may limit the size of files (LimitFSIZE)."""

log = structlog.get_logger()


class KeptBytes:
    """The bytes that were written last. One process at a time has them."""

    def __init__(self, memory_fd: int) -> None:
        """`memory_fd` is a memfd that the launcher holds, too; -1: nothing outlives this process."""
        self._fd = os.memfd_create("kept") if memory_fd < 0 else memory_fd
        self._refused = False

    def read(self) -> bytes:
        """Return them; none before the first `write`."""
        at, length = self._head()
        return os.pread(self._fd, length, at)

    def write(self, body: bytes) -> None:
        """Replace them. Those that the limit on files has no room for are not kept."""
        at, length = self._head()
        free = _FIRST if _FIRST + len(body) <= at else max(_FIRST, at + length)
        try:
            if os.pwrite(self._fd, body, free) == len(body):
                os.pwrite(self._fd, _HEAD.pack(free, len(body)), 0)
                return
            reason = "too many"
        except OSError as error:
            reason = str(error)
        if not self._refused:
            log.warning("counters are not kept for the next scheduler process: is LimitFSIZE too small?", reason=reason)
        self._refused = True

    def _head(self) -> tuple[int, int]:
        at, length = _HEAD.unpack(os.pread(self._fd, _HEAD.size, 0).ljust(_HEAD.size, b"\0"))
        return at, length
