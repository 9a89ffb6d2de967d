"""Children that hang: find them by their heartbeats, get a stack dump, kill them.

    a line ──► the child serves, and describes itself if it is a shard
    no heartbeat for --hang-timeout, or STUCK ──► SIGABRT, SIGCONT to the process group ──► ABORT_GRACE ──► SIGKILL

A child is watched from that line on: loading a model may take any time, and may hold the interpreter lock.
SIGABRT makes faulthandler write the stacks of all threads, also while a thread holds the interpreter lock. A stopped process
handles it only when it continues.
"""

from __future__ import annotations

import asyncio
import os
import signal
from base64 import b64decode
from contextlib import suppress

import structlog
from google.protobuf.message import DecodeError

from text_generation_launcher.plan import ChildSpec
from text_generation_proto.heartbeat import CHECK_EVERY_S, MAX_DESCRIPTION, STUCK, Silence
from text_generation_proto.v1 import shard_pb2 as pb

ABORT_GRACE = 1.0
"""Seconds between SIGABRT and SIGKILL: time to write the stacks."""

log = structlog.get_logger()


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
    described: asyncio.Future[pb.InfoResponse] | None = None,
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
    spec: ChildSpec, heartbeat_fd: int, hung: asyncio.Event, described: asyncio.Future[pb.InfoResponse] | None
) -> None:
    line = await _first_line(heartbeat_fd)
    if line is None:
        return
    try:
        description = pb.InfoResponse.FromString(b64decode(line, validate=True))
    except (ValueError, DecodeError):
        log.error("child hangs", child=spec.name, reason="its description cannot be read")
        hung.set()
        return
    if described is not None and not described.done():
        described.set_result(description)
    silence = Silence()
    while True:
        await asyncio.sleep(CHECK_EVERY_S)
        beats = _read(heartbeat_fd)
        silence.record(sign=bool(beats))
        if beats.endswith(STUCK):
            reason = "a step of its engine does not end"
        elif silence.exceeds(spec.hang_timeout):
            reason = f"no heartbeat for {silence.seconds} s"
        else:
            continue
        log.error("child hangs", child=spec.name, reason=reason)
        hung.set()
        return


async def _first_line(fd: int) -> bytes | None:
    """Wait for the line before the first heartbeat; None if there is none because the child has closed its end."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    read = b""
    loop.add_reader(fd, readable.set)
    try:
        while b"\n" not in read and len(read) < MAX_DESCRIPTION:
            await readable.wait()
            readable.clear()
            if not (some := _read(fd)):
                return None
            read += some
    finally:
        loop.remove_reader(fd)
    return read.partition(b"\n")[0]


def _kill(process_group: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process_group, number)


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, 1 << 16)
    except BlockingIOError:
        return b""
