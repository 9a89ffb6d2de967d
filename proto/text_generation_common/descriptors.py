"""A reserve of file descriptors for work that must succeed when none is left."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress


class DescriptorReserve:
    """Open descriptors, closed while one task that needs descriptors runs."""

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
        while self._held:
            os.close(self._held.pop())

    def _fill(self) -> None:
        with suppress(OSError):  # too few are left: a part of the reserve
            while len(self._held) < self._number:
                self._held.append(os.open(os.devnull, os.O_RDONLY))
