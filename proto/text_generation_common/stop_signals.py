"""The signals that stop a process, and waiting for one of several ends."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable


class StopSignals:
    """Events set by SIGTERM, SIGINT or SIGHUP: `stop` by the first signal, `hurry` by the second."""

    def __init__(self) -> None:
        """Install the signal handlers."""
        self.stop = asyncio.Event()
        self.hurry = asyncio.Event()
        loop = asyncio.get_running_loop()
        for sig in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(sig, self._received)

    def on_hangup(self, reload: Callable[[], object]) -> None:
        """Let SIGHUP call `reload` instead of stopping."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload)

    def _received(self) -> None:
        (self.hurry if self.stop.is_set() else self.stop).set()


async def wait_for_any(*awaitables: Awaitable[object]) -> None:
    """Wait until one of the awaitables is done, then stop waiting for the others."""

    async def wait(awaitable: Awaitable[object]) -> None:
        await awaitable

    async with asyncio.TaskGroup() as tasks:
        waits = [tasks.create_task(wait(awaitable)) for awaitable in awaitables]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for task in waits:
            task.cancel()
