"""Children that hang: find them by their heartbeats, get a stack dump, kill them.

    a line ──► the child serves, and describes itself if it is a shard
    no heartbeat for --hang-timeout, or STUCK ──► SIGABRT, SIGCONT to the process group ──► ABORT_GRACE ──► SIGKILL

A child is watched from its first heartbeat on. That of a shard comes with the line: loading a model may take any time, and
may hold the interpreter lock. A router sends heartbeats before the line, too; until then its timeout is at least the default,
because a start keeps its event loop busy for seconds.
SIGABRT makes faulthandler write the stacks of all threads, also while a thread holds the interpreter lock. A stopped process
handles it only when it continues.
"""

from __future__ import annotations

import asyncio
import os
import signal
from base64 import b64decode
from contextlib import suppress
from typing import Never

import structlog
from google.protobuf.message import DecodeError

from text_generation_common.heartbeat import ALIVE, CHECK_EVERY_S, HANG_TIMEOUT_S, MAX_DESCRIPTION, STUCK, Silence
from text_generation_launcher.plan import ChildSpec
from text_generation_proto.v1 import shard_pb2 as pb

ABORT_GRACE = 1.0
"""Seconds between SIGABRT and SIGKILL: time to write the stacks."""

log = structlog.get_logger()


class _ChildHangs(Exception):
    """The child sends no heartbeats, or says that it is stuck."""


def heartbeat_pipe() -> tuple[int, int]:
    """Return the two ends of a new pipe: ours, and that of the child."""
    read_fd, write_fd = os.pipe()
    os.set_blocking(read_fd, False)
    return read_fd, write_fd


async def abort_if_hung(
    spec: ChildSpec,
    process_group: int,
    heartbeat_fd: int,
    hung: asyncio.Event,
    described: asyncio.Future[pb.InfoResponse],
) -> None:
    """Set `hung` when the child hangs. End its process group once `hung` is set, by this child or another.

    `described` gets the child's description.
    """
    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(_watch(spec, heartbeat_fd, hung, described))
        await hung.wait()
        watching.cancel()
    # A process that enabled faulthandler writes its stacks.
    for number in (signal.SIGABRT, signal.SIGCONT):
        _kill(process_group, number)
    await asyncio.sleep(ABORT_GRACE)
    _kill(process_group, signal.SIGKILL)


async def _watch(
    spec: ChildSpec, heartbeat_fd: int, hung: asyncio.Event, described: asyncio.Future[pb.InfoResponse]
) -> None:
    try:
        line = await _first_line(heartbeat_fd, spec.hang_timeout and max(spec.hang_timeout, HANG_TIMEOUT_S))
        if line is None:
            return
        description = pb.InfoResponse.FromString(b64decode(line, validate=True))
        if not described.done():
            described.set_result(description)
        await _until_silent(heartbeat_fd, spec.hang_timeout)
    except _ChildHangs as error:
        reason = str(error)
    except (ValueError, DecodeError):
        reason = "its description cannot be read"
    log.error("child hangs", child=spec.name, reason=reason)
    hung.set()


async def _first_line(fd: int, timeout_s: float) -> bytes | None:
    """Wait for the line; None if the child has closed its end. Raises _ChildHangs."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    silence = Silence()
    line = b""
    check_every_s = None
    loop.add_reader(fd, readable.set)
    try:
        while b"\n" not in line and len(line) < MAX_DESCRIPTION:
            with suppress(TimeoutError):
                async with asyncio.timeout(check_every_s):
                    await readable.wait()
            woken = readable.is_set()
            readable.clear()
            if (read := _read(fd)) is None:
                return None
            if read or not woken:  # the event loop may report once more what has been read already
                silence.record(sign=bool(read))
                _check(silence, timeout_s)
            line += read.lstrip(ALIVE)
            check_every_s = CHECK_EVERY_S
    finally:
        loop.remove_reader(fd)
    return line.partition(b"\n")[0]


async def _until_silent(fd: int, timeout_s: float) -> Never:
    """Wait until the child hangs. Raises _ChildHangs."""
    silence = Silence()
    while True:
        await asyncio.sleep(CHECK_EVERY_S)
        beats = _read(fd) or b""
        silence.record(sign=bool(beats))
        if beats.endswith(STUCK):
            raise _ChildHangs("a step of its engine does not end")
        _check(silence, timeout_s)


def _check(silence: Silence, timeout_s: float) -> None:
    if silence.exceeds(timeout_s):
        raise _ChildHangs(f"no heartbeat for {silence.seconds} s")


def _kill(process_group: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process_group, number)


def _read(fd: int) -> bytes | None:
    """Return what has arrived; None if the other end is closed."""
    try:
        return os.read(fd, 1 << 16) or None
    except BlockingIOError:
        return b""
