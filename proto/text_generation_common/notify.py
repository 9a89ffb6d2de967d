"""Messages to the service manager that started this process: sd_notify(3), systemd's protocol, without its library.

    READY=1      the server serves              WATCHDOG=1   the event loop turns, four times in each WatchdogSec
    STOPPING=1   it begins to stop              STATUS=…     one line for `systemctl status`

A message that the service manager cannot take now is sent again with the next beat. Without a service manager nothing is
sent.
"""

import os
import socket
from collections.abc import Callable, Mapping
from time import monotonic

VARIABLES = frozenset({"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"})
"""Environment variables that are meant for one process, and not for its children."""


class Notifier:
    """The sending end of the service manager's socket."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        address = environ.get("NOTIFY_SOCKET", "")
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) if address else None
        watched = environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        self._watchdog_s = int(environ.get("WATCHDOG_USEC", "0")) / 1e6 if watched else 0.0
        self._watched_at = 0.0
        self._status: Callable[[], str] = str
        self._shown = ""
        self._unsent: dict[str, str] = {}
        self.is_ready = False
        """Set by `ready`, after the calls of `on_ready`."""
        self.on_ready: Callable[[], None] = lambda: None
        if self._socket is not None:
            self._socket.settimeout(0)

    def __del__(self) -> None:
        """Close the socket. It is held, so that beats need no new descriptor."""
        if self._socket is not None:
            self._socket.close()

    def show(self, status: Callable[[], str]) -> None:
        """Show this status from now on. It is computed again at each beat, and sent if it has changed."""
        self._status = status
        self._send()

    def ready(self) -> None:
        self.on_ready()
        self.is_ready = True
        self._unsent["READY"] = "1"
        self._send()

    def stopping(self) -> None:
        self._unsent["STOPPING"] = "1"
        self._send()

    def beat(self) -> None:
        """Tell that there is progress. Called at least every half second."""
        if self._watchdog_s and monotonic() - self._watched_at >= self._watchdog_s / 4:
            self._unsent["WATCHDOG"] = "1"
            self._watched_at = monotonic()
        self._send()

    def _send(self) -> None:
        if self._socket is None:
            return
        if (status := " ".join(self._status().split())) != self._shown:
            self._shown = self._unsent["STATUS"] = status
        if not self._unsent:
            return
        try:
            message = "\n".join(f"{key}={value}" for key, value in self._unsent.items())
            self._socket.sendto(message.encode(), self._address)
        except OSError:  # its queue is full, or it restarts
            return
        self._unsent.clear()
