"""One child process: started, its output passed on, ended in order."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import structlog

from text_generation_launcher import leftovers
from text_generation_launcher.lines import Forwarder
from text_generation_launcher.plan import ChildSpec
from text_generation_launcher.stop import StopSignals

LAST_WORDS_TIMEOUT = 2.0
"""Seconds to wait for the end of a dead child's output, should a process it started elsewhere keep it open."""

log = structlog.get_logger()


async def run_to_end(spec: ChildSpec, stop: StopSignals, *, json_output: bool) -> int:
    """Run a child until it ends by itself, and return its exit code. Cancelled, end it in order first.

    The child leads a process group of its own. A terminal sends Ctrl-C to the whole foreground group: the children must
    not get it, the launcher stops them in order. What a child leaves behind is ended with its group; what has left the
    group is found by its mark, once it had the time for its last words.
    """
    mark = leftovers.new_mark()
    read_fd, write_fd = os.pipe()
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read_fd, "rb", buffering=0)
    )
    try:
        try:
            process = await asyncio.create_subprocess_exec(
                *spec.argv,
                env={**spec.env, leftovers.VARIABLE: mark},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=write_fd,
                stderr=write_fd,
                pass_fds=spec.inherited_fds,
                process_group=0,
            )
        finally:
            os.close(write_fd)
        async with asyncio.TaskGroup() as tasks:
            forwarding = tasks.create_task(Forwarder(spec.name, json_output=json_output).forward(reader))
            try:
                log.debug("child started", child=spec.name, pid=process.pid)
                return await process.wait()
            finally:
                await _end(process, spec, stop)
                await asyncio.wait([forwarding], timeout=LAST_WORDS_TIMEOUT)
                await leftovers.end(mark)
                forwarding.cancel()
    finally:
        transport.close()


async def _end(process: asyncio.subprocess.Process, spec: ChildSpec, stop: StopSignals) -> None:
    """SIGTERM, patience, SIGKILL; then the same for what is left of the group, without the patience."""
    if process.returncode is None:
        _terminate(process)
        try:
            async with stop.patience(spec.stop_timeout, remind=lambda: _terminate(process)):
                await process.wait()
        except TimeoutError:
            process.kill()
            log.warning("child killed", child=spec.name, pid=process.pid)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


def _terminate(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):
        process.terminate()


@contextmanager
def lifeline() -> Iterator[int]:
    """The read end of a pipe whose write end nobody but this process holds: it closes when this process is gone."""
    read_fd, write_fd = os.pipe()  # not inheritable, but where a child is started with the read end
    try:
        yield read_fd
    finally:
        os.close(read_fd)
        os.close(write_fd)
