"""Graceful shutdown: the first signal drains, a second one forces."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress

from text_generation_common.log import log
from text_generation_common.stop_signals import STOP_SIGNALS

FORCED_GRACE = 1.0
"""Seconds that a child has left once a second signal arrived."""

LOST_GRACE = 5.0
"""Seconds that a child has left once the running requests cannot be finished."""
LOST_SECOND_SIGNAL = 0.5
"""Seconds until it then gets a second SIGTERM, at which the router drops these requests."""

GracePeriod = Callable[[float, Callable[[], None]], AbstractAsyncContextManager[None]]
"""Type of `GracefulShutdown.grace_period`: seconds and a function that sends SIGTERM again."""


def send(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    """Send a signal. The methods of `process` would collect the exit code of one that has just ended: asyncio then reports 255."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.kill(process.pid, number)


class GracefulShutdown:
    """Handler of SIGTERM, SIGINT and SIGHUP, and the grace periods of stopping children."""

    def __init__(self, *, reloads: bool = False) -> None:
        """`reloads`: SIGHUP asks the router to read its files again, and does not stop."""
        self.requested = asyncio.Event()
        self.reload = asyncio.Event()
        """Set by the next SIGHUP that asks for it; each has its own event."""
        self._reloads = reloads
        self._forced = False
        self._lost = False
        self._stopping: dict[asyncio.Timeout, Callable[[], None]] = {}

    def listen(self) -> None:
        """Install the signal handlers. A signal that is ignored stays ignored, as nohup requires."""
        for sig in STOP_SIGNALS:
            if signal.getsignal(sig) is not signal.SIG_IGN:
                asyncio.get_running_loop().add_signal_handler(sig, self.receive, sig)

    def receive(self, sig: signal.Signals) -> None:
        if sig is signal.SIGHUP and self._reloads:
            self.reload.set()
            self.reload = asyncio.Event()
        elif not self.requested.is_set():
            self.requested.set()
            log.info("stopping", signal=sig.name)
        elif not self._forced:
            self._forced = True
            for timeout, terminate in self._stopping.items():
                terminate()
                self._shorten(timeout, FORCED_GRACE)
            log.warning("stopping at once", signal=sig.name)

    def requests_lost(self) -> None:
        """Shorten all grace periods: no shard, or no router, is left to finish the requests."""
        self._lost = True
        for timeout, terminate in self._stopping.items():
            self._lose(timeout, terminate)

    @asynccontextmanager
    async def grace_period(self, seconds: float, terminate: Callable[[], None]) -> AsyncIterator[None]:
        """Limit the time of a stopping child, like asyncio.timeout.

        A second signal calls `terminate` and leaves FORCED_GRACE seconds. After `requests_lost`, `terminate` is called
        after LOST_SECOND_SIGNAL seconds, and at most LOST_GRACE seconds are left.
        """
        async with asyncio.timeout(seconds) as timeout:
            if self._forced:
                self._shorten(timeout, FORCED_GRACE)
            self._stopping[timeout] = terminate
            if self._lost:
                self._lose(timeout, terminate)
            try:
                yield
            finally:
                del self._stopping[timeout]

    def _lose(self, timeout: asyncio.Timeout, terminate: Callable[[], None]) -> None:
        def ask_again() -> None:
            if timeout in self._stopping:
                terminate()

        self._shorten(timeout, LOST_GRACE)
        asyncio.get_running_loop().call_later(LOST_SECOND_SIGNAL, ask_again)

    @staticmethod
    def _shorten(timeout: asyncio.Timeout, grace: float) -> None:
        due = timeout.when()
        earliest = asyncio.get_running_loop().time() + grace
        if due is None or due > earliest:
            timeout.reschedule(earliest)
