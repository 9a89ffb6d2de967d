"""The limit of open file descriptors, and a reserve for work that must succeed when none is left."""

from __future__ import annotations

import asyncio
import os
import resource
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

MOST_DESCRIPTORS = 1 << 20
"""Highest soft limit set. Some programs close every descriptor up to the limit, and containers may allow a billion."""


def raise_descriptor_limit() -> None:
    """Raise the soft limit of descriptors to the hard one. Child processes inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):  # refused in a sandbox: the old limit stays
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class DescriptorReserve:
    """Open descriptors that are given up for work that needs some: one piece of work at a time."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._held: list[int] = []
        self._in_use = asyncio.Lock()
        self._fill()

    @asynccontextmanager
    async def released(self) -> AsyncIterator[None]:
        """Close the reserve while the block lasts."""
        async with self._in_use:
            self.close()
            try:
                yield
            finally:
                self._fill()

    def close(self) -> None:
        """Close the reserve."""
        while self._held:
            os.close(self._held.pop())

    def _fill(self) -> None:
        with suppress(OSError):  # too few are left: a part of the reserve
            while len(self._held) < self._number:
                self._held.append(os.open(os.devnull, os.O_RDONLY))
