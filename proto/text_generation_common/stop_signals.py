"""The signals that stop a process."""

import asyncio
import signal
from collections.abc import Callable


class StopSignals:
    """Events set by SIGTERM, SIGINT or SIGHUP: `stop` by the first signal, `hurry` by the second."""

    def __init__(self) -> None:
        """Install the signal handlers."""
        self.stop = asyncio.Event()
        self.hurry = asyncio.Event()
        loop = asyncio.get_running_loop()
        for sig in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(sig, lambda: (self.hurry if self.stop.is_set() else self.stop).set())

    def on_hangup(self, reload: Callable[[], object]) -> None:
        """Let SIGHUP call `reload` instead of stopping."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload)
