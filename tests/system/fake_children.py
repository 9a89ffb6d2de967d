"""Small processes instead of shards and router, for tests of the launcher's supervision.

Each writes messages about its state to a journal, one per line.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, MutableMapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import structlog
from ports import free_port

from text_generation_common.exit_codes import ExitCode
from text_generation_common.heartbeat import VARIABLE
from text_generation_common.notify import Notifier
from text_generation_launcher.plan import ChildSpec, LaunchPlan, ShardSpec
from text_generation_launcher.restarts import RestartPolicy, ServerEnded
from text_generation_launcher.shutdown import GracefulShutdown
from text_generation_launcher.supervisor import Supervisor

SHARD = """
import asyncio, os, signal, socket, sys
if os.path.exists(FAULT) and open(FAULT).read() != "hangs":
    os._exit(int(open(FAULT).read()))
async def main():
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    socket.socket(socket.AF_UNIX).bind(ADDRESS.removeprefix("unix://"))
    say("shard-listens")
    await serve(stop)
    say(f"{NAME} stops")
    os._exit(0)
async def serve(stop):
    if os.path.exists(FAULT):
        say(f"{NAME} hangs {os.getpid()}")
    else:
        os.write(int(os.environ[HEARTBEAT]), b"\\n")
        say(f"{NAME} serves {os.getpid()}")
    await stop.wait()
"""
"""A shard that says that it serves, and no more. If the file FAULT exists, it exits with the code in it, or hangs."""

ROUTER = """
import http.server, os, signal, sys, threading
if os.path.exists(FAULT):
    os._exit(int(open(FAULT).read()))
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("content-length", "0"); self.end_headers()
    def log_message(self, *args): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", PORT), Handler)
def stop(*_):
    say("router-stops")
    drain()
    threading.Thread(target=server.shutdown).start()
def drain(): pass
def main():
    signal.signal(signal.SIGTERM, stop)
    os.write(int(os.environ[HEARTBEAT]), b"\\n")
    say(f"router-listens {os.getpid()}")
    server.serve_forever(poll_interval=0.01)
"""
"""A router with a health route only. If the file FAULT exists, it exits with the code in it."""


WORKER = """
import os, signal
say(f"{name} starts {{os.getpid()}}")
open('{gate}').read()
os.write(int(os.environ['{variable}']), b"\\n")
say("{name} serves")
signal.pause()
"""
"""An HTTP worker that serves nothing."""

TIMEOUT = 60.0
"""Seconds to wait for a message or a log record."""


class Journal:
    """The messages of the fake processes, in order."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "journal"
        os.mkfifo(self.path)
        # Opened for reading and writing: reading never ends, and no writer blocks.
        self._pipe = os.open(self.path, os.O_RDWR | os.O_NONBLOCK)
        self._unread = b""

    async def next(self) -> str:
        """Wait for the next message. Raises TimeoutError after TIMEOUT seconds."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(TIMEOUT):
            while b"\n" not in self._unread:
                readable = asyncio.Event()
                loop.add_reader(self._pipe, readable.set)
                try:
                    await readable.wait()
                finally:
                    loop.remove_reader(self._pipe)
                self._unread += os.read(self._pipe, 1 << 16)
        message, self._unread = self._unread.split(b"\n", 1)
        return message.decode()

    def close(self) -> None:
        os.close(self._pipe)

    def argv(self, script: str) -> tuple[str, ...]:
        """Return a command line that runs `script`, which can `say` messages."""
        say = f"def say(word):\n    with open({str(self.path)!r}, 'a') as file: file.write(word + '\\n')\n"
        return (sys.executable, "-c", say + script)


def child(name: str, journal: Journal, script: str, *, stop_timeout: float = 20.0) -> ChildSpec:
    """Return a process that runs `script`."""
    return ChildSpec(name, journal.argv(script), dict(os.environ), (), stop_timeout)


class LogRecords:
    """The launcher's log records: a structlog processor, used as the last one."""

    def __init__(self) -> None:
        self._records: asyncio.Queue[MutableMapping[str, Any]] = asyncio.Queue()

    def __call__(self, _logger: object, method: str, record: MutableMapping[str, Any]) -> Mapping[str, Any]:
        self._records.put_nowait({**record, "level": method})
        raise structlog.DropEvent

    async def next(self, event: str) -> MutableMapping[str, Any]:
        """Wait for the next record of an event; drop the records before it. Raises TimeoutError."""
        async with asyncio.timeout(TIMEOUT):
            while True:
                record = await self._records.get()
                if record["event"] == event:
                    return record

    def rest(self, event: str) -> list[MutableMapping[str, Any]]:
        """Return all remaining records of an event."""
        records = []
        while not self._records.empty():
            records.append(self._records.get_nowait())
        return [record for record in records if record["event"] == event]


class FakeServer:
    """Fake shards and a fake router under a real supervisor."""

    def __init__(self, folder: Path, log: LogRecords) -> None:
        self.folder = folder
        self.log = log
        self.journal = Journal(folder)
        self.stop = GracefulShutdown(reloads=True)
        self.router_change = ""
        """Code that replaces parts of the router."""
        self.messages: list[str] = []
        self.pids: dict[str, int] = {}
        self._port = free_port()

    def fail(self, place: int | str, fault: object) -> None:
        """Make a shard, or "router", exit with code `fault` at its next starts, or a shard hang."""
        (self.folder / f"fault{place}").write_text(str(fault))

    def heal(self, replica: int) -> None:
        """Make the shard serve again at its next start."""
        (self.folder / f"fault{replica}").unlink()

    def gate(self, number: int) -> Path:
        """Return the named pipe that a worker reads before it serves."""
        if not (path := self.folder / f"gate{number}").exists():
            os.mkfifo(path)
        return path

    def shard(self, replica: int, rank: int | None = None, change: str = "") -> ShardSpec:
        """Return the shard of a replica, or one rank of its group; `change` is code that replaces parts of it."""
        place = f"{replica}" if rank is None else f"{replica}-{rank}"
        name = f"shard-{replica}" if rank is None else f"shard-{replica}-rank-{rank}"
        address = f"unix://{self.folder}/s{place}"
        values = f"NAME, FAULT, ADDRESS, HEARTBEAT = {name!r}, {str(self.folder / f'fault{place}')!r}, {address!r}, {VARIABLE!r}"
        return ShardSpec(
            name=name,
            argv=self.journal.argv(f"{values}\n{SHARD}\n{change}\nasyncio.run(main())"),
            env=dict(os.environ),
            inherited_fds=(),
            stop_timeout=20.0,
            replica=replica,
            rank=rank or 0,
            address=address,
            group_address="" if rank is None else f"unix://{self.folder}/g{replica}",
        )

    def supervisor(self, policy: RestartPolicy, *shards: ShardSpec, workers: int = 0) -> Supervisor:
        """Return a supervisor of these shards and a router; each of `workers` serves once its file `gateN` can be read."""
        values = f"PORT, HEARTBEAT, FAULT = {self._port}, {VARIABLE!r}, {str(self.folder / 'faultrouter')!r}"
        router = child("router", self.journal, f"{values}\n{ROUTER}\n{self.router_change}\nmain()")
        http = (
            child(f"worker-{n}", self.journal, WORKER.format(name=f"worker-{n}", gate=self.gate(n), variable=VARIABLE))
            for n in range(workers)
        )
        plan = LaunchPlan(shards, (router, *http), "127.0.0.1", self._port)
        return Supervisor(plan, self.stop, policy, Notifier({}))

    @asynccontextmanager
    async def running(self, policy: RestartPolicy, *shards: ShardSpec) -> AsyncIterator[asyncio.Task[ExitCode | None]]:
        """Run a supervisor and yield its task once it is ready. The task returns the exit code."""
        supervisor = self.supervisor(policy, *shards)
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(exit_code(supervisor))
            ready = tasks.create_task(supervisor.ready.wait())
            await asyncio.wait((task, ready), return_when=asyncio.FIRST_COMPLETED)
            assert supervisor.ready.is_set(), task.result()
            await self.wait_for("router-listens")
            yield task
            task.cancel()

    async def wait_for(self, *messages: str) -> None:
        """Wait for messages in any order; a process id at the end of a message is recorded and ignored."""
        missing = set(messages)
        while missing:
            self.messages.append(message := await self.journal.next())
            text, _, last = message.rpartition(" ")
            if last.isdecimal():
                self.pids[text.split()[0]] = int(last)
            missing -= {text, message}

    def kill(self, place: int | str) -> None:
        """Send SIGKILL to a shard: `0`, or `0-rank-1` of a group."""
        os.kill(self.pids[f"shard-{place}"], signal.SIGKILL)


async def exit_code(supervisor: Supervisor) -> ExitCode | None:
    """Run a supervisor; return the exit code with which it ends the launcher."""
    try:
        await supervisor.run()
    except ExceptionGroup as errors:
        error: Exception = errors
        while isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
        assert isinstance(error, ServerEnded)
        return error.code
    return None


@contextmanager
def fake_server() -> Iterator[FakeServer]:
    """Yield a fake server that receives the launcher's log records."""
    before = structlog.get_config()
    log = LogRecords()
    structlog.configure(processors=[log])
    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        server = FakeServer(Path(folder), log)
        yield server
        server.journal.close()
    structlog.configure(**before)
