"""One worker process as the router sees it: a question goes out, an answer comes back, or the worker ends."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable

from text_generation_router.sandbox.errors import SandboxCrashed, SandboxError, SandboxOutOfMemory, SandboxTimeout
from text_generation_router.sandbox.frames import HEADER, MAX_MESSAGE, Kind, pack

READ_SIZE = 1 << 18
REAP_INTERVAL_S = 0.01
ENVIRONMENT = (
    "PATH",
    "PYTHONPATH",
    "PYTHONHOME",
    "LD_LIBRARY_PATH",
    "TZ",
    "TZDIR",
    "LANG",
    "LC_ALL",
    "LC_CTYPE",
    "LC_TIME",
)
"""What a worker gets to see of the environment: no tokens and no keys."""

Outcome = bytes | SandboxError
Done = Callable[["WorkerProcess", Outcome], None]


class WorkerProcess:
    """A child process. It answers one question at a time, and is killed when it is too slow.

    The child is started at once, on this thread (half a millisecond): it dies with the thread that started it. All else
    are callbacks on the event loop, and nothing waits: neither for a full socket nor for a dying child.
    """

    def __init__(self, factory: str, max_output: int, ended_idle: Callable[[WorkerProcess], None]) -> None:
        """Raises OSError if there is no process to be had."""
        self._loop = asyncio.get_running_loop()
        self._max_body = max(max_output, 4 * MAX_MESSAGE + 4)
        self._ended_idle = ended_idle
        self._done: Done | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._received = bytearray()
        self._unsent = memoryview(b"")
        self._alive = True
        self.gone: asyncio.Future[None] = self._loop.create_future()
        """Done when the process has ended and is no zombie."""
        self._socket, child_end = socket.socketpair()
        self._socket.settimeout(0)  # not blocking
        with child_end:
            try:
                self._process = _start(factory, child_end.fileno())
            except OSError:
                self._socket.close()
                raise
        self._loop.add_reader(self._socket.fileno(), self._readable)

    @property
    def alive(self) -> bool:
        """Whether it can be asked."""
        return self._alive

    @property
    def pid(self) -> int:
        """Of the child."""
        return self._process.pid

    def ask(self, payload: bytes, timeout_s: float, done: Done) -> None:
        """Send `payload`; `done` is called once, with the answer or with what went wrong."""
        assert self._done is None, "a worker answers one question at a time"
        self._done = done
        self._timer = self._loop.call_later(timeout_s, self._too_slow, timeout_s)
        self._send(pack(Kind.REQUEST, payload))

    def end(self, error: SandboxError) -> None:
        """Kill the child; who waits for an answer gets `error`. Safe to call twice."""
        if not self._alive:
            return
        self._alive = False
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_writer(self._socket.fileno())
        self._socket.close()
        self._process.kill()
        self._reap()
        if self._done is not None:
            self._answer(error)
        else:
            self._ended_idle(self)

    def _too_slow(self, timeout_s: float) -> None:
        self.end(SandboxTimeout(f"took longer than {timeout_s:g} s"))

    def _answer(self, outcome: Outcome) -> None:
        done, self._done = self._done, None
        if self._timer is not None:
            self._timer.cancel()
        if done is not None:
            done(self, outcome)

    def _send(self, frame: bytes) -> None:
        try:
            sent = self._socket.send(frame)
        except BlockingIOError:
            sent = 0
        except OSError:  # it has died; the reader is about to see it
            return
        if sent < len(frame):
            self._unsent = memoryview(frame)[sent:]
            self._loop.add_writer(self._socket.fileno(), self._writable)

    def _writable(self) -> None:
        try:
            self._unsent = self._unsent[self._socket.send(self._unsent) :]
        except BlockingIOError:
            return
        except OSError:
            self._unsent = self._unsent[:0]
        if not self._unsent:
            self._loop.remove_writer(self._socket.fileno())

    def _readable(self) -> None:
        try:
            data = self._socket.recv(READ_SIZE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.end(self._how_it_ended())
            return
        self._received += data
        if len(self._received) < HEADER.size:
            return
        size, kind = HEADER.unpack_from(self._received)
        if self._done is None or size > self._max_body:
            self.end(SandboxError("the worker broke the protocol"))
        elif len(self._received) >= HEADER.size + size:
            body = bytes(memoryview(self._received)[HEADER.size : HEADER.size + size])
            del self._received[: HEADER.size + size]
            self._frame(kind, body)

    def _frame(self, kind: int, body: bytes) -> None:
        if kind == Kind.RESULT:
            self._answer(body)
        elif kind == Kind.FAILED:
            self._answer(SandboxError(body.decode(errors="replace")))
        else:
            self.end(SandboxOutOfMemory("needs more memory than it may have"))

    def _how_it_ended(self) -> SandboxCrashed:
        code = self._process.poll()
        if code is not None and code < 0:
            return SandboxCrashed(f"the worker died of {signal.Signals(-code).name}")
        return SandboxCrashed("the worker ended")

    def _reap(self) -> None:
        """Collect the child's exit code. A killed child ends within milliseconds, but not at once."""
        if self._process.poll() is None:
            self._loop.call_later(REAP_INTERVAL_S, self._reap)
        elif not self.gone.done():
            self.gone.set_result(None)


def _start(factory: str, channel: int) -> subprocess.Popen[bytes]:
    # -P: the folder this runs in must not have a say in what `import` finds.
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "text_generation_router.sandbox.worker", factory],
        stdin=channel,
        stdout=channel,
        stderr=subprocess.DEVNULL,
        env={name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
    )
