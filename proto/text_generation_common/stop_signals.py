"""The signals that stop a process."""

import asyncio
import signal
from collections.abc import Callable

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def ignore_stop_signals(loop: asyncio.AbstractEventLoop) -> None:
    """Ignore further signals in a process that ends: a closed loop would leave the default handlers, which change its exit code."""
    for sig in STOP_SIGNALS:
        loop.remove_signal_handler(sig)
        signal.signal(sig, signal.SIG_IGN)


class StopSignals:
    """Events set by SIGTERM, SIGINT or SIGHUP: `stop` by the first signal, `hurry` by the second."""

    def __init__(self) -> None:
        """Install the signal handlers."""
        self.stop = asyncio.Event()
        self.hurry = asyncio.Event()
        loop = asyncio.get_running_loop()
        for sig in STOP_SIGNALS:
            loop.add_signal_handler(sig, lambda: (self.hurry if self.stop.is_set() else self.stop).set())

    def on_hangup(self, reload: Callable[[], object]) -> None:
        """Let SIGHUP call `reload` instead of stopping."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload)
