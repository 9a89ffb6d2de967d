"""Children that hang: find them by their heartbeats, get a stack dump, kill them.

    a line ──► the child serves, and describes itself if it is a shard
    no heartbeat for --hang-timeout, or STUCK ──► SIGABRT, SIGCONT to the process group ──► ABORT_GRACE ──► SIGKILL

A child is watched from its first heartbeat on. That of a shard comes with the line: loading a model may take any time, and
may hold the interpreter lock. A router sends heartbeats before the line, too; until then its timeout is at least the default,
because a start keeps its event loop busy for seconds.
SIGABRT makes faulthandler write the stacks of all threads, also while a thread holds the interpreter lock. A stopped process
handles it only when it continues.
"""

import asyncio
import os
import signal
from base64 import b64decode
from contextlib import suppress

from google.protobuf.message import DecodeError

from text_generation_common.heartbeat import ALIVE, CHECK_EVERY_S, HANG_TIMEOUT_S, STUCK, Silence
from text_generation_common.log import log
from text_generation_common.waiting import background
from text_generation_launcher.plan import ChildSpec
from text_generation_proto.v1 import shard_pb2 as pb

MAX_DESCRIPTION = 1 << 20
"""Bytes of the line that describes a child."""
ABORT_GRACE = 1.0
"""Seconds between SIGABRT and SIGKILL: time to write the stacks."""


async def abort_if_hung(
    spec: ChildSpec,
    process_group: int,
    heartbeats: asyncio.StreamReader,
    hung: asyncio.Event,
    described: asyncio.Future[pb.InfoResponse],
) -> None:
    """Set `hung` when the child hangs. End its process group once `hung` is set, by this child or another.

    `described` gets the child's description.
    """
    async with background(_watch(spec, heartbeats, hung, described)):
        await hung.wait()
    # A process that enabled faulthandler writes its stacks.
    for number in (signal.SIGABRT, signal.SIGCONT):
        _kill(process_group, number)
    await asyncio.sleep(ABORT_GRACE)
    _kill(process_group, signal.SIGKILL)


async def _watch(
    spec: ChildSpec,
    heartbeats: asyncio.StreamReader,
    hung: asyncio.Event,
    described: asyncio.Future[pb.InfoResponse],
) -> None:
    """Set `hung` when the child hangs. Return if it closes its end of the pipe before it has described itself."""
    silence, line, check_every_s, reason = Silence(), b"", None, ""
    timeout_s = spec.hang_timeout and max(spec.hang_timeout, HANG_TIMEOUT_S)
    while not reason:
        read = b""
        with suppress(TimeoutError):
            async with asyncio.timeout(check_every_s):
                read = await heartbeats.read(1 << 16)
                if not read and b"\n" not in line:
                    return
                if not read:  # the pipe is closed: the child ends, or lives on and is silent
                    await asyncio.sleep(CHECK_EVERY_S)
        silence.record(sign=bool(read))
        if not read:
            reason = f"no heartbeat for {silence.seconds} s" if silence.exceeds(timeout_s) else ""
            continue
        check_every_s = CHECK_EVERY_S
        if b"\n" in line:
            reason = "a step of its engine does not end" if read.endswith(STUCK) else ""
            continue
        line += read.lstrip(ALIVE)
        if len(line) > MAX_DESCRIPTION:
            reason = "its description cannot be read"
            continue
        if b"\n" in line:
            timeout_s = spec.hang_timeout
            try:
                description = pb.InfoResponse.FromString(b64decode(line.partition(b"\n")[0], validate=True))
            except (ValueError, DecodeError):
                reason = "its description cannot be read"
            else:
                if not described.done():
                    described.set_result(description)
    log.error("child hangs", child=spec.name, reason=reason)
    hung.set()


def _kill(process_group: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process_group, number)
