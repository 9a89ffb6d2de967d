"""Heartbeats: the rule by which a process that hangs is found.

    shard, router ──one byte every half second──► launcher    over a pipe that the child inherits. A line says that
                                                              the child serves, and what a shard serves
    shard ◄──a health check every half second──── router      over gRPC
    launcher, or shard or router alone ──► service manager    its watchdog (notify.py)

An observer counts its own checks in a row without a sign of life. It does not compare clocks, so time in which it did not run
does not count: after a stop, or on a busy machine, it has made no checks either. The event loop of the sender writes the
heartbeats, so they prove that the process runs, its event loop turns, and its interpreter lock is free.
"""

import asyncio
import os
from base64 import b64encode
from contextlib import suppress
from dataclasses import dataclass

from text_generation_common.notify import Notifier

HANG_TIMEOUT_S = 15.0
"""Default of --hang-timeout."""
CHECK_EVERY_S = 0.5
"""Seconds between two checks of an observer, and between two heartbeats."""
LEAD_S = 1.0
"""Seconds before the limit at which an observer acts, so that others who learn of it keep the limit too."""
MIN_SILENCE_S = 1.0
"""Shortest silence that counts as a hang, however short the limit is."""

VARIABLE = "TEXT_GENERATION_HEARTBEAT"
"""Environment variable with the descriptor of the pipe."""
ALIVE = b"."
STUCK = b"!"
"""Heartbeats of a process that makes progress, and of one whose engine is in a step that does not end."""


@dataclass(slots=True)
class Silence:
    """The time without a sign of life, in checks of the observer."""

    _checks: int = 0

    def record(self, *, sign: bool) -> None:
        """Record a check; `sign`: there was a sign of life since the check before."""
        self._checks = 0 if sign else self._checks + 1

    @property
    def seconds(self) -> float:
        return self._checks * CHECK_EVERY_S

    def exceeds(self, timeout_s: float) -> bool:
        """Return True if it would exceed `timeout_s` before the observer's findings have spread; 0: never."""
        return timeout_s > 0 and self.seconds >= max(timeout_s - LEAD_S, MIN_SILENCE_S)


class HeartbeatSender:
    """The sending end of the pipe to the launcher. A process without a launcher tells the service manager, if it has one."""

    def __init__(self, notifier: Notifier) -> None:
        self._notifier = notifier
        self._unsent = b""
        self._fd = int(os.environ.pop(VARIABLE, -1))
        if self._fd >= 0:
            os.set_blocking(self._fd, False)

    def serves(self, description: bytes = b"") -> None:
        """Tell the launcher that this process serves; `description` is the InfoResponse of a shard."""
        self._unsent = b64encode(description) + b"\n"
        self.send(ALIVE)

    def send(self, beat: bytes) -> None:
        """Send a heartbeat. It is dropped if the launcher does not read, or is gone."""
        if self._fd >= 0:
            with suppress(OSError):
                self._unsent = self._unsent[os.write(self._fd, self._unsent + beat) :]
        if beat == ALIVE:
            self._notifier.beat()


async def send_heartbeats(notifier: Notifier) -> None:
    """Send heartbeats until cancelled. When `notifier` becomes ready, the launcher is told first."""
    sender = HeartbeatSender(notifier)
    notifier.on_ready = sender.serves
    while True:
        sender.send(ALIVE)
        await asyncio.sleep(CHECK_EVERY_S)
