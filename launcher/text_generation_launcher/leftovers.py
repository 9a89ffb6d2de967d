"""What a child leaves behind, wherever it went.

The process group of a child is ended with it. MPI's daemon and the ranks it starts are out of that reach: the daemon opens a
session of its own (`orted --set-sid`). But a process is born with the environment of the one that starts it, so a mark in
the child's finds them all. Left alone they would keep the memory of the device that the next shard needs.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
from contextlib import suppress
from pathlib import Path

import structlog

VARIABLE = "TEXT_GENERATION_CHILD"
"""Which child of which launcher a process belongs to."""

PATIENCE = 5.0
"""Seconds to wait for killed processes to be gone: one in a call of the device's driver ends only with that call."""
LOOK_EVERY = 0.05

log = structlog.get_logger()


def new_mark() -> str:
    """A value of VARIABLE that no other process has."""
    return secrets.token_hex(16)


def find(mark: str) -> list[int]:
    """The processes that bear the mark, this one apart; a zombie bears none. Without /proc nothing is found."""
    wanted = f"{VARIABLE}={mark}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environ = (folder / "environ").read_bytes()
        except OSError:  # it is gone, or somebody else's
            continue
        if wanted in environ.split(b"\0") and (pid := int(folder.name)) != os.getpid():
            found.append(pid)
    return found


def kill(mark: str) -> list[int]:
    """Kill them; returns which there were."""
    found = find(mark)
    for pid in found:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    return found


async def end(mark: str) -> None:
    """Kill them until none is left, or PATIENCE is over."""
    first = left = await asyncio.to_thread(kill, mark)
    with suppress(TimeoutError):
        async with asyncio.timeout(PATIENCE):
            while left:
                await asyncio.sleep(LOOK_EVERY)
                left = await asyncio.to_thread(kill, mark)
    if first:
        log.warning("killed what a child left behind", pids=first, still_there=left)
