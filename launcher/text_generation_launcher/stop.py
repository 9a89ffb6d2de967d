"""The wish to stop: a first signal asks for it, a second one hurries it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import structlog

HURRY_GRACE = 1.0
"""Seconds a child still has once a second signal came."""

VAIN_GRACE = 5.0
"""Seconds a child still has once there is nothing left to wait for."""
VAIN_REMINDER = 0.5
"""Seconds after which it is told so, by a second SIGTERM: the router then drops what it cannot finish."""

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

log = structlog.get_logger()


class StopSignals:
    """Listens for SIGTERM, SIGINT and SIGHUP."""

    def __init__(self) -> None:
        self.requested = asyncio.Event()
        self._hurried = False
        self._in_vain = False
        self._waiting: dict[asyncio.Timeout, Callable[[], None]] = {}

    def listen(self) -> None:
        """Take over the signals. One that is ignored stays so: nohup means it."""
        for sig in _SIGNALS:
            if signal.getsignal(sig) is not signal.SIG_IGN:
                asyncio.get_running_loop().add_signal_handler(sig, self.receive, sig)

    def receive(self, sig: signal.Signals) -> None:
        """One signal has come."""
        if not self.requested.is_set():
            self.requested.set()
            log.info("stopping", signal=sig.name)
        elif not self._hurried:
            self._hurried = True
            for timeout, remind in self._waiting.items():
                remind()
                self._shorten(timeout, HURRY_GRACE)
            log.warning("stopping at once", signal=sig.name)

    def expect_nothing(self) -> None:
        """Whoever stops from now on cannot finish what it has: the router without a shard."""
        self._in_vain = True

    @asynccontextmanager
    async def patience(self, seconds: float, remind: Callable[[], None]) -> AsyncIterator[None]:
        """Like asyncio.timeout, but a second signal calls `remind` and leaves HURRY_GRACE seconds.

        Where there is nothing left to wait for, `remind` is called by and by, and VAIN_GRACE seconds are left.
        """
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(seconds) as timeout:
            if self._hurried:
                self._shorten(timeout, HURRY_GRACE)
            reminder = None
            if self._in_vain:
                self._shorten(timeout, VAIN_GRACE)
                reminder = loop.call_later(VAIN_REMINDER, remind)
            self._waiting[timeout] = remind
            try:
                yield
            finally:
                del self._waiting[timeout]
                if reminder is not None:
                    reminder.cancel()

    @staticmethod
    def _shorten(timeout: asyncio.Timeout, grace: float) -> None:
        due = timeout.when()
        soon = asyncio.get_running_loop().time() + grace
        if due is None or due > soon:
            timeout.reschedule(soon)
