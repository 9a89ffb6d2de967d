"""The signals that stop a process."""

import asyncio
import signal
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

Code = TypeVar("Code", bound=int)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def run_to_end(
    main: Coroutine[Any, Any, Code], loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None
) -> Code:
    """Run the main coroutine of a process that ends after it; return its exit code.

    Further signals are ignored then: a closed loop would leave the default handlers, which change the exit code.
    """
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        try:
            return runner.run(main)
        finally:
            for sig in STOP_SIGNALS:
                runner.get_loop().remove_signal_handler(sig)
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
