"""One child process: start it, forward its output line by line, stop it."""

import asyncio
import json
import os
import secrets
import shutil
import signal
import sys
from collections.abc import Callable, Coroutine
from contextlib import ExitStack, suppress

from text_generation_common import heartbeat
from text_generation_common.descriptors import DescriptorReserve
from text_generation_common.log import log
from text_generation_common.logs import COLOUR, PRIORITIES, VARIABLE, LogReader, escape, log_reader
from text_generation_common.progress import RELAYED, show
from text_generation_launcher import hangs, orphans
from text_generation_launcher.plan import ChildSpec
from text_generation_launcher.shutdown import GracePeriod
from text_generation_proto.v1 import shard_pb2 as pb

OUTPUT_TIMEOUT = 2.0
"""Seconds to wait for the end of a dead child's output, which a process that it started may keep open."""
RESET = "\x1b[0m"
"""Ends the colours of a line, also of one that a child broke off."""
MAX_LINE_BYTES = 64 * 1024
"""Longest line of a child's output; a longer one is split."""

_states: dict[str, str] = {}
"""The progress of each child that tells it, by its name, as the line of the terminal shows it."""


async def run_to_end(
    spec: ChildSpec,
    grace_period: GracePeriod,
    *,
    hung: asyncio.Event | None = None,
    described: asyncio.Future[pb.InfoResponse] | None = None,
    reserve: DescriptorReserve | None = None,
    beside: Callable[[asyncio.subprocess.Process], Coroutine[None, None, None]] | None = None,
) -> int:
    """Run a child until it ends by itself and return its exit code. When cancelled, stop it first.

    A child that hangs is aborted. Children with the same `hung`, an event, are aborted together. `described` gets the
    description of a shard that serves; for another child that serves it is empty. `reserve` has descriptors for its start and
    end. `beside` runs as long as the child.

    The child leads its own process group: a terminal sends Ctrl-C to the whole foreground group, but the launcher stops
    its children in order. When the child has ended, its group is killed, then processes that left the group (orphans.py).
    """
    mark = secrets.token_hex(16)
    reserve = reserve or DescriptorReserve(0)
    with ExitStack() as ours:
        async with reserve.released():
            with ExitStack() as ends_of_child:
                heartbeats, beat_fd = await _open_pipe(ours, ends_of_child)
                output, output_fd = await _open_pipe(ours, ends_of_child)
                process = await asyncio.create_subprocess_exec(
                    *spec.argv,
                    env={**spec.env, orphans.VARIABLE: mark, heartbeat.VARIABLE: str(beat_fd)}
                    | {VARIABLE: log_reader()},
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output_fd,
                    stderr=output_fd,
                    pass_fds=(*spec.inherited_fds, beat_fd),
                    process_group=0,
                )
        async with asyncio.TaskGroup() as tasks:
            forwarding = tasks.create_task(forward_output(output, spec.name, json_output=spec.config.json_output))
            watching = tasks.create_task(
                hangs.abort_if_hung(
                    spec,
                    process.pid,
                    heartbeats,
                    hung or asyncio.Event(),
                    described or asyncio.get_running_loop().create_future(),
                )
            )
            companion = None if beside is None else tasks.create_task(beside(process))
            try:
                log.debug("child started", child=spec.name, pid=process.pid)
                return await process.wait()
            finally:
                watching.cancel()
                if companion is not None:
                    companion.cancel()
                await _run_whole(_end(process, spec, grace_period, forwarding, mark, reserve))
                forwarding.cancel()


async def _open_pipe(ours: ExitStack, ends_of_child: ExitStack) -> tuple[asyncio.StreamReader, int]:
    """Return the two ends of a new pipe: ours, and that of the child. The stacks close them."""
    read_fd, write_fd = os.pipe()
    ends_of_child.callback(os.close, write_fd)
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read_fd, "rb", buffering=0)
    )
    ours.callback(transport.close)
    return reader, write_fd


async def _run_whole(work: Coroutine[None, None, None]) -> None:
    """Run `work` to its end. A cancellation meanwhile comes after it."""
    task = asyncio.create_task(work)  # noqa: TID251 - awaited at once
    cancellation: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            cancellation = error
    if cancellation is not None:
        raise cancellation
    task.result()


async def _end(
    process: asyncio.subprocess.Process,
    spec: ChildSpec,
    grace_period: GracePeriod,
    forwarding: asyncio.Task[None],
    mark: str,
    reserve: DescriptorReserve,
) -> None:
    """End a child and what it left behind; wait for its output."""
    await _stop(process, spec, grace_period)
    await asyncio.wait([forwarding], timeout=OUTPUT_TIMEOUT)
    await orphans.reap(mark, reserve)


async def _stop(process: asyncio.subprocess.Process, spec: ChildSpec, grace_period: GracePeriod) -> None:
    """Send SIGTERM, wait, send SIGKILL; then SIGKILL to the rest of its process group."""
    if process.returncode is None:
        _terminate(process)
        try:
            async with grace_period(spec.stop_timeout, lambda: _terminate(process)):
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


async def forward_output(reader: asyncio.StreamReader, name: str, *, json_output: bool) -> None:
    """Write the lines of a child to standard error, labelled, until all holders of its output have closed it."""
    try:
        line = bytearray()
        while chunk := await reader.read(1 << 16):
            line += chunk
            if b"\n" in chunk:
                end = line.rindex(b"\n")
                _write_lines(bytes(line[:end]), name, json_output=json_output)
                del line[: end + 1]
            elif len(line) > MAX_LINE_BYTES:
                _write_lines(bytes(line), name, json_output=json_output)
                line.clear()
        if line:  # a last line without a line break
            _write_lines(bytes(line), name, json_output=json_output)
    finally:  # also where another process holds the output and is waited for no longer
        _show_state(name, "")


def _write_lines(lines: bytes, name: str, *, json_output: bool) -> None:
    for line in lines.split(b"\n"):
        if not json_output and line.startswith(RELAYED.encode()):
            _show_state(name, line[len(RELAYED) :].decode(errors="backslashreplace").strip())
            continue
        sys.stderr.buffer.write(label(line, name, json_output=json_output))  # does not block: a LogWriter
    sys.stderr.buffer.flush()


def _show_state(name: str, text: str) -> None:
    """Show the progress of a child in place of its last one; "" removes it."""
    if _states.get(name, "") == text:
        return
    _states.pop(name, None)
    if text:
        _states[name] = escape(text)
    columns = shutil.get_terminal_size().columns
    show(" · ".join(f"{name}: {state}" for name, state in sorted(_states.items()))[: columns - 1])


def label(line: bytes, name: str, *, json_output: bool) -> bytes:
    """Return the line with a line break, and with the child's name unless it is a log record that has it already.

    Control characters are escaped, but for colours on a terminal. The priority of a record stays its start.
    """
    text = line.removesuffix(b"\r").decode(errors="backslashreplace")
    priority = text[:3] if text[:3] in PRIORITIES.values() else ""
    text = text.removeprefix(priority)
    if not json_output:
        labelled = text if f"process={name}" in COLOUR.sub("", text) else f"{name}: {text}"
        parts = COLOUR.split(labelled) if log_reader() is LogReader.TERMINAL else [labelled]
        parts[::2] = map(escape, parts[::2])
        return f"{priority}{''.join(parts)}{RESET if parts[1:] else ''}\n".encode()
    if text.startswith("{") and f'"process": "{name}"' in text.replace('":"', '": "') and text.isprintable():
        return f"{priority}{text}\n".encode()
    record = {"process": name, "level": "info", "event": "output", "message": text, "text": text}
    return f"{priority}{json.dumps(record)}\n".encode()
