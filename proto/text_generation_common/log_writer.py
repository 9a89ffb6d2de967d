"""Log output that neither blocks nor fails: a bounded queue, and a thread that writes from it to a file descriptor.

    any thread ──write()──► queue ──thread──► file descriptor     full, closed or stalled: lines are dropped and counted

A disk that is full, a pipe without a reader and a reader that stalls stop the log, never the process.
"""

import io
import os
import select
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from typing_extensions import Buffer

QUEUE_BYTES = 1 << 20
"""Bytes of log lines that wait for a slow reader. The oldest lines above this are dropped, so that the last ones remain."""
GATHER_S = 0.01
"""Seconds between the first line in an empty queue and the write: waking the thread costs more than a line."""
GATHER_BYTES = 1 << 16
"""Bytes in the queue at which the write is not delayed."""
RETRY_S = 1.0
"""Seconds between two attempts to report dropped lines while nothing else is logged."""
DRAIN_S = 1.0
"""Seconds that a process which ends waits for its last lines to be written."""
ERASE_LINE = b"\r\x1b[K"
"""Control sequence of terminals: to the start of the line, and erase it."""


class LogWriter(io.RawIOBase):
    """Log lines for a file descriptor: the `buffer` of a text stream. Each call of `write` has whole lines."""

    def __init__(self, fd: int, report: Callable[[int], bytes], queue_bytes: int = QUEUE_BYTES) -> None:
        """`report` returns the line that states a number of dropped lines. It is written where they are missing."""
        self.dropped = 0
        """Lines that were dropped so far."""
        self._fd = fd
        self._report = report
        self._queue_bytes = queue_bytes
        self._queue: deque[bytes] = deque()
        self._size = 0
        """Bytes in the queue."""
        self._changed = threading.Condition()
        self._idle = False
        """True while the thread waits for lines."""
        self._reported = 0
        """Dropped lines that are stated in the log."""
        self._torn = False
        """True if the last line was not written to its end."""
        self._status = self._shown = b""
        """The line below the log that is to be shown, and the one that is."""
        threading.Thread(target=self._run, name="log", daemon=True).start()

    def write(self, data: Buffer, /) -> int:
        """Queue lines. Never blocks, never fails."""
        lines = bytes(data)
        with self._changed:
            self._queue.append(lines)
            self._size += len(lines)
            while self._size > self._queue_bytes:
                oldest = self._queue.popleft()
                self._size -= len(oldest)
                self.dropped += oldest.count(b"\n")
            if self._idle and (len(self._queue) == 1 or self._size > GATHER_BYTES):
                self._changed.notify_all()
        return len(lines)

    def drain(self, timeout: float = DRAIN_S) -> None:
        """Wait until everything is written, at most `timeout` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._idle and not self._queue, timeout)

    def show_status(self, text: str) -> None:
        """Show a line below the log, on a terminal, in place of the last one; "" removes it."""
        with self._changed:
            self._status = text.encode()
            self._changed.notify_all()

    def fileno(self) -> int:
        return self._fd

    def writable(self) -> bool:
        return True

    def _run(self) -> None:
        while True:
            lines = self._next()
            if self._shown:
                self._put_status(b"")
            dropped = self.dropped
            if dropped > self._reported and not self._write(self._report(dropped - self._reported)):
                self._reported = dropped
            if lost := self._write(lines):
                with self._changed:
                    self.dropped += lost
            if self._status:
                self._put_status(self._status)

    def _next(self) -> bytes:
        """Wait for lines; return all that are queued. Empty if only dropped lines are to be reported."""
        with self._changed:
            if not self._queue:
                self._idle = True
                self._changed.notify_all()
                retry = RETRY_S if self.dropped > self._reported else None
                self._changed.wait_for(lambda: bool(self._queue) or self._status != self._shown, retry)
                if self._queue:
                    self._changed.wait_for(lambda: self._size > GATHER_BYTES, GATHER_S)
                self._idle = False
            lines = b"".join(self._queue)
            self._queue.clear()
            self._size = 0
            return lines

    def _put_status(self, status: bytes) -> None:
        """Write a status in place of the last one."""
        self._shown = status
        with suppress(OSError):
            self._write_some(ERASE_LINE + status)

    def _write(self, lines: bytes) -> int:
        """Write lines; return how many were not written to their end."""
        rest = memoryview(lines)
        try:
            if self._torn and lines:
                self._write_some(b"\n")
                self._torn = False
            while rest:
                rest = rest[self._write_some(rest) :]
                self._torn = lines[len(lines) - len(rest) - 1] != ord("\n")
        except OSError:  # no space, no reader, an error of the device, no such descriptor
            return bytes(rest).count(b"\n")
        return 0

    def _write_some(self, data: Buffer) -> int:
        while True:
            try:
                return os.write(self._fd, data)
            except BlockingIOError:  # the other owner of a terminal or pipe made it non-blocking
                select.select([], [self._fd], [])
