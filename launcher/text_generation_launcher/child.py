"""One child process: start it, forward its output line by line, stop it. One that hangs is found by its heartbeats, and killed.

    a line ──► the child serves, and describes itself if it is a shard
    no heartbeat for --hang-timeout, or STUCK ──► SIGABRT, SIGCONT to the process group ──► ABORT_GRACE ──► SIGKILL

A child is watched from its first heartbeat on. That of a shard comes with the line: loading a model may take any time, and
may hold the interpreter lock. A router sends heartbeats before the line, too; until then its timeout is at least the default,
because a start keeps its event loop busy for seconds.
SIGABRT makes faulthandler write the stacks of all threads, also while a thread holds the interpreter lock. A stopped process
handles it only when it continues.
"""

import asyncio
import json
import os
import secrets
import shutil
import signal
import sys
from base64 import b64decode
from collections.abc import Callable, Coroutine
from contextlib import ExitStack, suppress

from google.protobuf.message import DecodeError

from text_generation_common import heartbeat
from text_generation_common.descriptors import DescriptorReserve
from text_generation_common.heartbeat import ALIVE, CHECK_EVERY_S, HANG_TIMEOUT_S, STUCK, Silence
from text_generation_common.log import log
from text_generation_common.logs import COLOUR, PRIORITIES, VARIABLE, LogReader, escape, log_reader
from text_generation_common.progress import RELAYED, show
from text_generation_common.waiting import background
from text_generation_launcher import orphans
from text_generation_launcher.plan import ChildSpec
from text_generation_launcher.shutdown import GracePeriod, send
from text_generation_proto.v1 import shard_pb2 as pb

OUTPUT_TIMEOUT = 2.0
"""Seconds to wait for the end of a dead child's output, which a process that it started may keep open."""
RESET = "\x1b[0m"
"""Ends the colours of a line, also of one that a child broke off."""
MAX_LINE_BYTES = 64 * 1024
"""Longest line of a child's output; a longer one is split."""

MAX_DESCRIPTION = 1 << 20
"""Bytes of the line that describes a child."""
ABORT_GRACE = 1.0
"""Seconds between SIGABRT and SIGKILL: time to write the stacks."""

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
    mark, hung, reserve = secrets.token_hex(16), hung or asyncio.Event(), reserve or DescriptorReserve(0)
    described = described or asyncio.get_running_loop().create_future()
    with ExitStack() as ours:
        async with reserve.released():
            with ExitStack() as ends_of_child:
                heartbeats, beat_fd = await _open_pipe(ours, ends_of_child)
                output, output_fd = await _open_pipe(ours, ends_of_child)
                process = await asyncio.create_subprocess_exec(
                    *spec.argv,
                    env={**spec.env, orphans.VARIABLE: mark, heartbeat.VARIABLE: str(beat_fd), VARIABLE: log_reader()},
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output_fd,
                    stderr=output_fd,
                    pass_fds=(*spec.inherited_fds, beat_fd),
                    process_group=0,
                )
        async with asyncio.TaskGroup() as tasks:
            forwarding = tasks.create_task(forward_output(output, spec.name, json_output=spec.config.json_output))
            watching = tasks.create_task(abort_if_hung(spec, process.pid, heartbeats, hung, described))
            companion = None if beside is None else tasks.create_task(beside(process))
            try:
                log.debug("child started", child=spec.name, pid=process.pid)
                return await process.wait()
            finally:
                watching.cancel()
                if companion is not None:
                    companion.cancel()

                async def end() -> None:
                    """End the child and what it left behind; wait for its output."""
                    await _stop(process, spec, grace_period)
                    await asyncio.wait([forwarding], timeout=OUTPUT_TIMEOUT)
                    await orphans.reap(mark, reserve)

                await _run_whole(end())
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


async def _stop(process: asyncio.subprocess.Process, spec: ChildSpec, grace_period: GracePeriod) -> None:
    """Send SIGTERM, wait, send SIGKILL; then SIGKILL to the rest of its process group."""
    if process.returncode is None:
        send(process, signal.SIGTERM)
        try:
            async with grace_period(spec.stop_timeout, lambda: send(process, signal.SIGTERM)):
                await process.wait()
        except TimeoutError:
            send(process, signal.SIGKILL)
            log.warning("child killed", child=spec.name, pid=process.pid)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


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
