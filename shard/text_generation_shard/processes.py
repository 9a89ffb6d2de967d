"""The descendants of this process, read from /proc."""

import os
import signal
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Process:
    """A process, identified by its id and start time, because ids are reused."""

    pid: int
    started: int

    @property
    def is_alive(self) -> bool:
        """True if it runs; False for a zombie."""
        read = _stat(self.pid)
        return read is not None and read[1] == self.started and read[2] != "Z"


def descendants() -> list[Process]:
    children: dict[int, list[Process]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (read := _stat(int(entry.name))) is not None:
            children.setdefault(read[0], []).append(Process(int(entry.name), read[1]))
    found: list[Process] = []
    waiting = [os.getpid()]
    while waiting:
        for child in children.get(waiting.pop(), ()):
            found.append(child)
            waiting.append(child.pid)
    return found


def kill(processes: Iterable[Process]) -> None:
    for process in processes:
        if process.is_alive:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process.pid, signal.SIGKILL)


def _stat(pid: int) -> tuple[int, int, str] | None:
    """Return (parent, start time, state) of a process; None if there is none."""
    try:
        # The name in parentheses may contain spaces and parentheses.
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return int(fields[1]), int(fields[19]), fields[0].decode()


def command(pid: int) -> str:
    """Return the command line of a process, joined with spaces; "" if there is none."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
    except OSError:
        return ""
