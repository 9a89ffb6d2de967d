"""The child process of a sandbox: `python -m text_generation_common.sandbox.worker MODULE:FACTORY`.

Standard input and output are one socket to its parent. The parent sends frames, and the worker answers each with one
frame: the length of the body (4 bytes, big-endian), the kind (1 byte), the body. The first body is the settings as JSON:
FACTORY(settings["config"]) may read files and returns a function. That one is called when the process is confined
(confine.py) and returns the job, a function from bytes to bytes. The first answer lists the measures of confinement that
the kernel refused. Each later body is an input of the job.
Only what the job needs is imported here: a worker must start fast and be small.
"""

import importlib
import json
import os
import resource
import signal
import struct
import sys
from enum import IntEnum
from typing import BinaryIO

from text_generation_common.grammar_options import JUDGE_STACK_BYTES
from text_generation_common.one_line import one_line
from text_generation_common.sandbox.confine import PR_SET_PDEATHSIG, confine, prctl

HEADER = struct.Struct(">IB")
MAX_MESSAGE = 1000
"""Characters of an error message that are sent to the parent."""


class FrameKind(IntEnum):
    """The kind of a frame. FAILED holds the error's message, one line; the worker ends after OUT_OF_MEMORY."""

    JOB = 0
    RESULT = 1
    FAILED = 2
    OUT_OF_MEMORY = 3


def main(factory: str) -> None:
    """Create the job, then answer until the parent closes the socket."""
    _ignore_signals_and_die_with_parent()
    reader, writer = _take_channel()
    job, max_output, cpu_s = None, 0, 0.0
    while header := reader.read(HEADER.size):
        payload = reader.read(HEADER.unpack(header)[0])
        kind, body = FrameKind.RESULT, b""
        try:
            if job is None:
                settings = json.loads(payload)
                _limit(settings["memory_bytes"], settings["niceness"])
                max_output, cpu_s = settings["max_output"], settings["cpu_s"]
                module, _, name = factory.partition(":")
                make = getattr(importlib.import_module(module), name)(settings["config"])
                refused = confine()
                job = make()
                body = "; ".join(refused)[:MAX_MESSAGE].encode(errors="replace")
            else:
                signal.setitimer(signal.ITIMER_PROF, cpu_s)  # at its end the kernel kills this process
                body = job(payload)
            if len(body) > max_output:
                raise ValueError(f"the result is longer than {max_output} bytes")
        except MemoryError:
            kind, body = FrameKind.OUT_OF_MEMORY, b""
        except BaseException as error:  # noqa: BLE001 - also a Rust panic; the parent names the error to the client
            kind, body = FrameKind.FAILED, one_line(error, MAX_MESSAGE).encode(errors="replace")
        signal.setitimer(signal.ITIMER_PROF, 0)
        writer.write(HEADER.pack(len(body), kind) + body)
        writer.flush()
        if job is None or kind is FrameKind.OUT_OF_MEMORY:
            return


def _ignore_signals_and_die_with_parent() -> None:
    """A parent that was asked to stop finishes its requests first and needs this worker for them: it ignores signals to
    the process group. If the parent dies, the kernel kills the worker, also in the middle of a job."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _take_channel() -> tuple[BinaryIO, BinaryIO]:
    """Move the socket away from standard input and output, which a job may read or write."""
    channel = os.dup(0)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    return os.fdopen(channel, "rb"), os.fdopen(channel, "wb", closefd=False)


def _limit(memory_bytes: int, niceness: int) -> None:
    """Limit memory, stack and priority.

    RLIMIT_DATA counts written memory (heap, private maps, stacks). RLIMIT_AS would also count libraries and reserved
    addresses: about a gigabyte that is never used."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    if most != resource.RLIM_INFINITY:
        memory_bytes = min(memory_bytes, most)
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    _, most = resource.getrlimit(resource.RLIMIT_STACK)
    stack_bytes = JUDGE_STACK_BYTES if most == resource.RLIM_INFINITY else min(JUDGE_STACK_BYTES, most)
    resource.setrlimit(resource.RLIMIT_STACK, (stack_bytes, stack_bytes))
    os.nice(niceness)


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except (BrokenPipeError, ConnectionResetError):  # the parent closed the socket
        os._exit(0)
