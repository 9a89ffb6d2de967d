"""The child process of a sandbox: `python -m text_generation_router.sandbox.worker MODULE:FACTORY`.

FACTORY(config) is called once and returns the job: a function from bytes to bytes. An error that it raises is told to
the router as one line. Only what the job needs is imported here: a worker must start fast and be small.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any

from text_generation_router.sandbox.frames import HEADER, Kind, one_line, pack

Job = Callable[[bytes], bytes]
Factory = Callable[[dict[str, Any]], Job]


def main(argv: list[str]) -> None:
    """Set limits, make the job, answer until the router hangs up."""
    _outlive_signals_but_not_the_parent()
    channel = _take_channel()
    settings = _read(channel)
    if settings is None:
        return
    try:
        values = json.loads(settings)
        _limit(memory_bytes=values["memory_bytes"], niceness=values["niceness"])
        job = _load(argv[0])(values["config"])
    except MemoryError:
        _write(channel, Kind.OUT_OF_MEMORY, b"")
        return
    except Exception as error:  # noqa: BLE001 - whatever it is, the router must hear of it
        _write(channel, Kind.FAILED, one_line(error).encode(errors="replace"))
        return
    _write(channel, Kind.RESULT, b"")
    while (payload := _read(channel)) is not None:
        kind, body = _answer(job, payload, values["max_output"])
        _write(channel, kind, body)
        if kind is Kind.OUT_OF_MEMORY:
            return


def _answer(job: Job, payload: bytes, max_output: int) -> tuple[Kind, bytes]:
    try:
        result = job(payload)
    except MemoryError:
        return Kind.OUT_OF_MEMORY, b""
    except Exception as error:  # noqa: BLE001 - the job's errors are the caller's to name
        return Kind.FAILED, one_line(error).encode(errors="replace")
    if len(result) > max_output:
        return Kind.FAILED, f"the result is longer than {max_output} bytes".encode()
    return Kind.RESULT, result


def _outlive_signals_but_not_the_parent() -> None:
    """A router that is asked to stop finishes its requests first, and needs this worker for it; a signal to the whole
    group must not take it away. If the router dies, the kernel kills this process, whatever it is doing."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, int(signal.SIGKILL))


def _take_channel() -> int:
    """The socket to the router, out of the way of whatever may read or print here."""
    channel = os.dup(0)
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)
    return channel


def _limit(*, memory_bytes: int, niceness: int) -> None:
    """RLIMIT_DATA counts what is written to (heap, private maps, stacks). RLIMIT_AS would count libraries and reserved
    addresses, too, of which a process has a gigabyte and uses nothing."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    if most != resource.RLIM_INFINITY:
        memory_bytes = min(memory_bytes, most)
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    os.nice(niceness)


def _load(name: str) -> Factory:
    module, _, factory = name.partition(":")
    loaded: Factory = getattr(importlib.import_module(module), factory)
    return loaded


def _read(channel: int) -> bytes | None:
    """A frame's body; None when the router has hung up."""
    header = _read_exactly(channel, HEADER.size)
    return None if header is None else _read_exactly(channel, HEADER.unpack(header)[0])


def _read_exactly(channel: int, size: int) -> bytes | None:
    pieces = []
    while size:
        piece = os.read(channel, min(size, 1 << 18))
        if not piece:
            return None
        pieces.append(piece)
        size -= len(piece)
    return b"".join(pieces)


def _write(channel: int, kind: Kind, body: bytes) -> None:
    rest = memoryview(pack(kind, body))
    while rest:
        rest = rest[os.write(channel, rest) :]


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (BrokenPipeError, ConnectionResetError):  # the router hung up: nobody is left to tell
        sys.exit(0)
