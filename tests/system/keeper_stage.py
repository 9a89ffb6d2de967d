"""A stage for tests of how the launcher keeps shards: small processes in the place of shards and router, and what is heard."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, MutableMapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import standins
import structlog

from text_generation_launcher.plan import LaunchPlan, ShardSpec
from text_generation_launcher.shard_restarts import RestartPolicy
from text_generation_launcher.shutdown import GracefulShutdown
from text_generation_launcher.supervisor import Supervisor

SHARD = """
import os
if os.path.exists(FATE):
    fate = open(FATE).read()
    if fate != "hangs":
        os._exit(int(fate))
async def serve(health, stop):
    if os.path.exists(FATE):
        say(f"{NAME} hangs {os.getpid()}")
        await stop.wait()
    else:
        await health.set("", health_pb2.HealthCheckResponse.SERVING)
        say(f"{NAME} serves {os.getpid()}")
        await stop.wait()
    say(f"{NAME} stops")
    os._exit(0)
"""
"""Serves, unless a file says what becomes of it instead: an exit code, or `hangs`."""


class Log:
    """What the launcher logs, as it logs it: a processor of structlog's, and the last one."""

    def __init__(self) -> None:
        self._records: asyncio.Queue[MutableMapping[str, Any]] = asyncio.Queue()

    def __call__(self, _logger: object, _method: str, record: MutableMapping[str, Any]) -> Mapping[str, Any]:
        self._records.put_nowait(record)
        raise structlog.DropEvent

    async def next(self, event: str) -> MutableMapping[str, Any]:
        """The next record of this event; waits for it, and drops what comes before."""
        while True:
            record = await self._records.get()
            if record["event"] == event:
                return record

    def rest(self, event: str) -> list[MutableMapping[str, Any]]:
        """All records of this event that have come and were not taken."""
        records = []
        while not self._records.empty():
            records.append(self._records.get_nowait())
        return [record for record in records if record["event"] == event]


class Stage:
    """Two shards and a router that can play, and what is heard of them."""

    def __init__(self, folder: Path, log: Log) -> None:
        self.folder = folder
        self.log = log
        self.journal = standins.Journal(folder)
        self.router_change = ""
        self.words: list[str] = []
        self.pids: dict[str, int] = {}
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port: int = probe.getsockname()[1]

    def socket(self, replica: int) -> Path:
        """Where a shard listens."""
        return self.folder / f"s{replica}"

    def doom(self, place: int | str, fate: object) -> None:
        """From its next start on, this becomes of the shard."""
        (self.folder / f"fate{place}").write_text(str(fate))

    def spare(self, replica: int) -> None:
        """From its next start on, the shard serves again."""
        (self.folder / f"fate{replica}").unlink()

    def shard(self, replica: int) -> ShardSpec:
        """A shard that says when it serves, hangs and stops."""
        change = f"NAME = 'shard-{replica}'\nFATE = {str(self.folder / f'fate{replica}')!r}\n{SHARD}"
        return standins.shard(self.journal, self.socket(replica), change=change, replica=replica)

    def member(self, replica: int, rank: int, change: str = "") -> ShardSpec:
        """The same as one of several shards of a replica, further changed."""
        name, place = f"shard-{replica}-rank-{rank}", f"{replica}-{rank}"
        change = f"NAME = {name!r}\nFATE = {str(self.folder / f'fate{place}')!r}\n{SHARD}\n{change}"
        spec = standins.shard(self.journal, self.folder / f"s{place}", change=change, replica=replica)
        return replace(spec, name=name, rank=rank, group_address=f"unix://{self.folder}/g{replica}")

    def plan(self, *shards: ShardSpec) -> LaunchPlan:
        """These shards, and a router in front."""
        return LaunchPlan(
            shards, standins.router(self.journal, self._port, change=self.router_change), "127.0.0.1", self._port
        )

    @asynccontextmanager
    async def playing(self, policy: RestartPolicy, *shards: ShardSpec) -> AsyncIterator[asyncio.Task[type | None]]:
        """A supervisor that is ready; its task comes to the kind of error it ended with. Stopped at the end."""
        supervisor = Supervisor(self.plan(*shards), GracefulShutdown(), policy, json_output=False)
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(_outcome(supervisor))
            ready = tasks.create_task(supervisor.ready.wait())
            await asyncio.wait((task, ready), return_when=asyncio.FIRST_COMPLETED)
            assert supervisor.ready.is_set(), task.result()
            await self.hear("router-listens")
            yield task
            task.cancel()

    async def hear(self, *words: str) -> None:
        """Wait for these words in any order, each itself or one that begins so and ends with a process id."""
        missing = set(words)
        while missing:
            self.words.append(heard := await self.journal.next())
            said, _, last = heard.rpartition(" ")
            if last.isdecimal():
                self.pids[said.split()[0]] = int(last)
            missing -= {said, heard}

    def kill(self, place: int | str) -> None:
        """kill -9 the shard that was heard last in this place: `0`, or `0-rank-1` of a group."""
        os.kill(self.pids[f"shard-{place}"], signal.SIGKILL)


async def _outcome(supervisor: Supervisor) -> type | None:
    try:
        await supervisor.run()
    except ExceptionGroup as errors:
        error: Exception = errors
        while isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
        return type(error)
    return None


@contextmanager
def open_stage() -> Iterator[Stage]:
    """A stage, and the launcher's log to it alone."""
    before = structlog.get_config()
    log = Log()
    structlog.configure(processors=[log])
    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        stage = Stage(Path(folder), log)
        yield stage
        stage.journal.close()
    structlog.configure(**before)
