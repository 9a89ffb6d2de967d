"""Children that hang: find them by their heartbeats, get a stack dump, kill them.

    no heartbeat for --hang-timeout, or STUCK ──► SIGABRT, SIGCONT to the process group ──► ABORT_GRACE ──► SIGKILL

A child is watched from its first heartbeat on: loading a model may take any time, and may hold the interpreter lock.
SIGABRT makes faulthandler write the stacks of all threads, also while a thread holds the interpreter lock. A stopped process
handles it only when it continues.
"""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress

import structlog

from text_generation_launcher.plan import ChildSpec
from text_generation_proto.heartbeat import CHECK_EVERY_S, STUCK, Silence

ABORT_GRACE = 1.0
"""Seconds between SIGABRT and SIGKILL: time to write the stacks."""

log = structlog.get_logger()


def heartbeat_pipe() -> tuple[int, int]:
    """Return the two ends of a new pipe: ours, and that of the child."""
    read_fd, write_fd = os.pipe()
    os.set_blocking(read_fd, False)
    return read_fd, write_fd


async def abort_if_hung(spec: ChildSpec, process_group: int, heartbeat_fd: int, hung: asyncio.Event) -> None:
    """Set `hung` when the child hangs. End its process group once `hung` is set, by this child or another."""
    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(_watch(spec, heartbeat_fd, hung))
        await hung.wait()
        watching.cancel()
    # A process that enabled faulthandler writes its stacks.
    for number in (signal.SIGABRT, signal.SIGCONT):
        _kill(process_group, number)
    await asyncio.sleep(ABORT_GRACE)
    _kill(process_group, signal.SIGKILL)


async def _watch(spec: ChildSpec, heartbeat_fd: int, hung: asyncio.Event) -> None:
    silence = Silence()
    heard = False
    while True:
        await asyncio.sleep(CHECK_EVERY_S)
        beats = _read(heartbeat_fd)
        heard = heard or bool(beats)
        silence.record(sign=bool(beats) or not heard)
        if beats.endswith(STUCK):
            reason = "a step of its engine does not end"
        elif silence.exceeds(spec.hang_timeout):
            reason = f"no heartbeat for {silence.seconds} s"
        else:
            continue
        log.error("child hangs", child=spec.name, reason=reason)
        hung.set()
        return


def _kill(process_group: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process_group, number)


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, 1 << 16)
    except BlockingIOError:
        return b""
