"""A shard whose engine's ranks are started by mpirun: the process between the launcher and the two.

    launcher ──► this ──► mpirun ──► trtllm-llmapi-launch, once a rank
                  │                      rank 0: the engine's server, and `handover` where the program would be
                  │                      others: the engine's workers
                  └────► shard           in the environment that `handover` was given

The script means its program to run below rank 0. The shard does not, because three things would be lost on the way down:
mpirun closes every descriptor it inherited before it starts a rank (odls_default_module.c of Open MPI 4, and PRRTE's of 5),
and with them the launcher's lifeline; a SIGTERM to mpirun reaches all ranks at once, and SIGKILL follows a second later
(odls_base_sigkill_timeout), while the shard still needs its ranks to stop in order; and rank 0 goes on with its server
after a program that failed (`set -e` in the script's subshell, TensorRT-LLM 1.2), so that nobody would hear of a shard that died.

So the shard is a child here like any other: its lifeline, its signals and its exit code are its own. This process ends with it,
and takes the ranks along; and where the ranks end first, the shard goes, too.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import socket
import struct
import sys
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress

import structlog

from text_generation_launcher import handover, leftovers
from text_generation_launcher.endings import ending
from text_generation_proto.logs import configure_logging
from text_generation_proto.process import ExitCode, ProcessConfig, follow_parent, parse_config

SEPARATOR = "--"
"""Stands before mpirun's command, and before the shard's."""

SHARD_ALONE_TIMEOUT = 5.0
"""Seconds a shard without its ranks has to stop."""
IN_ORDER_TIMEOUT = 5.0
"""Seconds the ranks have to end once the script knows that its program has."""
TERMINATED_TIMEOUT = 3.0
"""Seconds mpirun has from SIGTERM on: it kills its ranks after one."""
STOP_MARGIN = IN_ORDER_TIMEOUT + TERMINATED_TIMEOUT
"""Seconds that this process may take to end after its shard has."""

log = structlog.get_logger()


class UnderMpirunConfig(ProcessConfig, cli_prog_name="text_generation_launcher.under_mpirun"):
    """Start ranks with mpirun, and a shard that uses them: [settings] -- mpirun … -- shard …"""

    replica: int = 0
    """Which copy of the model; names it in the log."""


class Handover:
    """Awaits the environment that rank 0 was given."""

    def __init__(self) -> None:
        self.environ: Mapping[str, str] | None = None
        self.received = asyncio.Event()
        self._name = f"text-generation-{secrets.token_hex(16)}"
        self._writers: list[asyncio.StreamWriter] = []

    @asynccontextmanager
    async def listen(self) -> AsyncIterator[Mapping[str, str]]:
        """Gives the variables that say where; closing it tells rank 0 that its program has ended."""
        # An abstract socket: no file to be left behind. Anyone may connect to it, so the kernel is asked who did.
        server = await asyncio.start_unix_server(self._receive, path=f"\0{self._name}")
        try:
            yield {handover.VARIABLE: self._name}
        finally:
            server.close()
            self.finish()

    def finish(self) -> None:
        """The program that rank 0 believes to run has ended."""
        for writer in self._writers:
            writer.close()
        self._writers.clear()

    async def _receive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        if _peer(writer) != os.geteuid() or self.received.is_set():
            writer.close()
            return
        with suppress(ValueError):  # it broke off: mpirun will have more to say
            environ = json.loads(await reader.read())
            self.environ = environ
            self.received.set()


def _peer(writer: asyncio.StreamWriter) -> int:
    """The user at the other end."""
    credentials = writer.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int(struct.unpack("iII", credentials)[1])


async def run(mpirun: Sequence[str], shard: Sequence[str], lifeline_fd: int) -> int:
    """Run both until the shard ends; its exit code, as a shell counts it, or FAILED where the ranks ended first."""
    stopping = asyncio.Event()
    for sig in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(sig, stopping.set)
    awaited = Handover()
    async with awaited.listen() as where:
        ranks = await asyncio.create_subprocess_exec(
            *mpirun, env={**os.environ, **where}, stdin=asyncio.subprocess.DEVNULL
        )
        try:
            await _first(awaited.received.wait(), ranks.wait(), stopping.wait())
            if stopping.is_set():
                return ExitCode.STOPPED
            if awaited.environ is None:
                log.error("mpirun ended before the ranks were there", **ending(await ranks.wait()))
                return ExitCode.FAILED
            return await _run_shard(shard, awaited.environ, lifeline_fd, ranks, stopping)
        finally:
            awaited.finish()
            await _end_ranks(ranks)


async def _run_shard(
    shard: Sequence[str],
    environ: Mapping[str, str],
    lifeline_fd: int,
    ranks: asyncio.subprocess.Process,
    stopping: asyncio.Event,
) -> int:
    process = await asyncio.create_subprocess_exec(
        *shard,
        env=environ,
        stdin=asyncio.subprocess.DEVNULL,
        pass_fds=() if lifeline_fd < 0 else (lifeline_fd,),
    )
    await _first(process.wait(), ranks.wait(), stopping.wait())
    if process.returncode is None:
        with suppress(ProcessLookupError):
            process.terminate()
    if stopping.is_set() or process.returncode is not None:
        code = await process.wait()  # the launcher has set it a time
        return code if code >= 0 else 128 - code
    log.error("the engine's ranks ended", **ending(await ranks.wait()))
    with suppress(TimeoutError):
        async with asyncio.timeout(SHARD_ALONE_TIMEOUT):
            await process.wait()
    if process.returncode is None:
        process.kill()
        await process.wait()
    return ExitCode.FAILED


async def _end_ranks(ranks: asyncio.subprocess.Process) -> None:
    for signal_, timeout in ((None, IN_ORDER_TIMEOUT), (signal.SIGTERM, TERMINATED_TIMEOUT)):
        if signal_ is not None:
            with suppress(ProcessLookupError):
                ranks.send_signal(signal_)
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await ranks.wait()
                return
    ranks.kill()  # what it has started is the launcher's to find
    await ranks.wait()


async def _first(*awaitables: Awaitable[object]) -> None:
    """Wait for one of them; none is cancelled."""

    async def wait(awaitable: Awaitable[object]) -> None:
        await awaitable

    async with asyncio.TaskGroup() as tasks:
        waits = [tasks.create_task(wait(awaitable)) for awaitable in awaitables]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for task in waits:
            task.cancel()


def split(argv: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Settings of ours, mpirun's command, the shard's command."""
    first = argv.index(SEPARATOR)
    second = argv.index(SEPARATOR, first + 1)
    return list(argv[:first]), list(argv[first + 1 : second]), list(argv[second + 1 :])


def main() -> None:
    """Entry point."""
    own, mpirun, shard = split(sys.argv[1:])
    config = parse_config(UnderMpirunConfig, own)
    mark = os.environ.get(leftovers.VARIABLE)
    follow_parent(config.lifeline_fd, last_will=None if mark is None else lambda: _leave_nothing(mark))
    configure_logging(config, f"shard-{config.replica}")
    sys.exit(asyncio.run(run(mpirun, shard, config.lifeline_fd)))


def _leave_nothing(mark: str) -> None:
    leftovers.kill(mark)


if __name__ == "__main__":
    main()
