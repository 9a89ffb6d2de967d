"""Kill processes that a child left behind.

The launcher kills the process group of a child. MPI's daemon and the ranks it starts leave that group: the daemon opens
its own session (`orted --set-sid`). But a process inherits the environment of its parent, so a mark in the child's
environment finds them all. Otherwise they would keep the GPU memory that the next shard needs.
"""

import asyncio
import os
import signal
from contextlib import suppress
from pathlib import Path

from text_generation_common.descriptors import DescriptorReserve
from text_generation_common.log import log

VARIABLE = "TEXT_GENERATION_CHILD"
"""Environment variable with the mark, a unique one, of the child that a process belongs to."""

KILL_TIMEOUT = 5.0
"""Seconds to wait for killed processes to end: one inside a call of the GPU driver ends only with that call."""
POLL_INTERVAL = 0.05


def find(mark: str) -> list[int]:
    """Return the pids of the processes with this mark, except this one and zombies. Empty without /proc."""
    variable = f"{VARIABLE}={mark}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environ = (folder / "environ").read_bytes()
        except OSError:  # it has ended, or belongs to another user
            continue
        if variable in environ.split(b"\0") and (pid := int(folder.name)) != os.getpid():
            found.append(pid)
    return found


def kill(mark: str) -> list[int]:
    """Send SIGKILL to the processes with this mark; return their pids."""
    found = find(mark)
    for pid in found:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    return found


async def reap(mark: str, reserve: DescriptorReserve) -> None:
    """Kill the processes with this mark until none is left, for at most KILL_TIMEOUT seconds."""
    try:
        async with reserve.released():
            first = left = await asyncio.to_thread(kill, mark)
        with suppress(TimeoutError):
            async with asyncio.timeout(KILL_TIMEOUT):
                while left:
                    await asyncio.sleep(POLL_INTERVAL)
                    async with reserve.released():
                        left = await asyncio.to_thread(kill, mark)
    except OSError as error:  # no descriptor to read /proc with
        log.error("processes that a child left behind cannot be found", reason=str(error))
        return
    if first:
        log.warning("killed processes that a child left behind", pids=first, still_there=left)
