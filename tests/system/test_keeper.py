"""Shards that die while serving: started again, tried again, given up. Small processes in the place of shard and router."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, MutableMapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import standins
import structlog

from text_generation_launcher.endings import ChildLost, ShardsHopeless
from text_generation_launcher.plan import Plan, ShardSpec
from text_generation_launcher.restarts import RestartPolicy
from text_generation_launcher.stop import StopSignals
from text_generation_launcher.supervise import Supervisor
from text_generation_proto.process import ExitCode

pytestmark = pytest.mark.system

LATER = (3600.0,)
"""Delays that no test lives to see the end of."""

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

    def doom(self, replica: int, fate: object) -> None:
        """From its next start on, this becomes of the shard."""
        (self.folder / f"fate{replica}").write_text(str(fate))

    def spare(self, replica: int) -> None:
        """From its next start on, the shard serves again."""
        (self.folder / f"fate{replica}").unlink()

    def shard(self, replica: int) -> ShardSpec:
        """A shard that says when it serves, hangs and stops."""
        change = f"NAME = 'shard-{replica}'\nFATE = {str(self.folder / f'fate{replica}')!r}\n{SHARD}"
        return standins.shard(self.journal, self.socket(replica), change=change, replica=replica)

    def plan(self, *shards: ShardSpec) -> Plan:
        """These shards, and a router in front."""
        return Plan(
            shards, standins.router(self.journal, self._port, change=self.router_change), "127.0.0.1", self._port
        )

    @asynccontextmanager
    async def playing(self, policy: RestartPolicy, *shards: ShardSpec) -> AsyncIterator[asyncio.Task[type | None]]:
        """A supervisor that is ready; its task comes to the kind of error it ended with. Stopped at the end."""
        supervisor = Supervisor(self.plan(*shards), StopSignals(), policy, json_output=False)
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(_outcome(supervisor))
            ready = tasks.create_task(supervisor.ready.wait())
            await asyncio.wait((task, ready), return_when=asyncio.FIRST_COMPLETED)
            assert supervisor.ready.is_set(), task.result()
            await self.hear("router-listens")
            yield task
            task.cancel()

    async def hear(self, word: str) -> None:
        """Wait for this word, or one that begins so and ends with a process id."""
        while True:
            self.words.append(heard := await self.journal.next())
            said, _, last = heard.rpartition(" ")
            if last.isdecimal():
                self.pids[said.split()[0]] = int(last)
            if word in (said, heard):
                return

    def kill(self, replica: int) -> None:
        """kill -9 the shard that was heard last in this place."""
        os.kill(self.pids[f"shard-{replica}"], signal.SIGKILL)


async def _outcome(supervisor: Supervisor) -> type | None:
    try:
        await supervisor.run()
    except ExceptionGroup as errors:
        error: Exception = errors
        while isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
        return type(error)
    return None


@pytest.fixture
def stage() -> Iterator[Stage]:
    before = structlog.get_config()
    log = Log()
    structlog.configure(processors=[log])
    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        stage = Stage(Path(folder), log)
        yield stage
        stage.journal.close()
    structlog.configure(**before)


async def test_a_killed_shard_is_started_again_and_nobody_else_notices(stage: Stage) -> None:
    async with stage.playing(RestartPolicy(delays=(0.0,)), stage.shard(0), stage.shard(1)):
        first = dict(stage.pids)
        stage.kill(1)
        died = await stage.log.next("shard died")
        assert (died["replica"], died["signal"], died["restart_in_s"]) == (1, "SIGKILL", 0.0)
        again = await stage.log.next("shard serves again")
        assert again["replica"] == 1
        assert again["seconds"] > 0
        await stage.hear("shard-1 serves")
        assert stage.pids["shard-1"] != first["shard-1"]
        assert stage.pids["shard-0"] == first["shard-0"]
        assert psutil.pid_exists(first["shard-0"])
        assert "router-stops" not in stage.words


async def test_the_socket_of_a_dead_shard_is_gone_before_the_next_one_starts(stage: Stage) -> None:
    async with stage.playing(RestartPolicy(delays=LATER), stage.shard(0), stage.shard(1)):
        assert stage.socket(1).is_socket()
        stage.kill(1)
        await stage.log.next("shard died")
        assert not stage.socket(1).exists()
        assert stage.socket(0).is_socket()


async def test_a_shard_that_cannot_live_waits_longer_each_time(stage: Stage) -> None:
    policy = RestartPolicy(max_restarts=4, delays=(0.01, 0.02, 0.03))
    async with stage.playing(policy, stage.shard(0)) as task:
        stage.doom(0, 4)
        stage.kill(0)
        assert await task is ShardsHopeless
    died = stage.log.rest("shard died")
    assert [record["exit_code"] for record in died] == [-9, 4, 4, 4, 4]
    assert [record["restart_in_s"] for record in died] == [0.01, 0.02, 0.03, 0.03, None]


async def test_serving_long_enough_starts_the_row_over(stage: Stage) -> None:
    policy = RestartPolicy(max_restarts=1, delays=(0.0, 3600.0), proven_after=1e-6)
    async with stage.playing(policy, stage.shard(0)):
        for _ in range(4):
            stage.kill(0)
            assert (await stage.log.next("shard died"))["restart_in_s"] == 0.0
            await stage.log.next("shard serves again")
            await stage.hear("shard-0 serves")


async def test_shards_that_are_hopeless_end_it_and_the_router_is_stopped_in_order(stage: Stage) -> None:
    async with stage.playing(RestartPolicy(max_restarts=2, delays=(0.0,)), stage.shard(0), stage.shard(1)) as task:
        for replica in range(2):
            stage.doom(replica, 1)
            stage.kill(replica)
        await stage.hear("router-stops")
        assert await task is ShardsHopeless
    assert not stage.socket(0).exists()
    assert not stage.socket(1).exists()


async def test_a_hopeless_shard_is_tried_on_while_another_serves(stage: Stage) -> None:
    policy = RestartPolicy(max_restarts=1, delays=(0.0, 0.01))
    async with stage.playing(policy, stage.shard(0), stage.shard(1)) as task:
        stage.doom(1, 1)
        stage.kill(1)
        for _ in range(5):
            assert (await stage.log.next("shard died"))["replica"] == 1
        assert not task.done()
        stage.spare(1)
        await stage.log.next("shard serves again")
        await stage.hear("shard-1 serves")
        assert "router-stops" not in stage.words


async def test_a_shard_that_serves_counts_however_often_it_has_died(stage: Stage) -> None:
    policy = RestartPolicy(max_restarts=1, delays=(0.0, 0.01))
    async with stage.playing(policy, stage.shard(0), stage.shard(1)) as task:
        for _ in range(3):  # by then its restarts are used up, and it serves all the same
            stage.kill(0)
            await stage.log.next("shard serves again")
            await stage.hear("shard-0 serves")
        stage.doom(1, 1)
        stage.kill(1)
        for _ in range(5):
            assert (await stage.log.next("shard died"))["restart_in_s"] is not None
        assert not task.done()


async def test_a_shard_that_only_loads_does_not_count_as_serving(stage: Stage) -> None:
    """Or two shards that die while loading, in turns, would never be given up."""
    async with stage.playing(RestartPolicy(max_restarts=1, delays=(0.0,)), stage.shard(0), stage.shard(1)) as task:
        stage.doom(0, 1)
        stage.kill(0)
        for _ in range(2):  # its restart is used up
            await stage.log.next("shard died")
        stage.doom(0, "hangs")
        await stage.hear("shard-0 hangs")
        stage.doom(1, 1)
        stage.kill(1)
        assert await task is ShardsHopeless
        await stage.hear("shard-0 stops")


async def test_settings_that_a_restart_refuses_are_hopeless_at_once(stage: Stage) -> None:
    async with stage.playing(RestartPolicy(delays=(0.0,)), stage.shard(0)) as task:
        stage.doom(0, int(ExitCode.USAGE))
        stage.kill(0)
        assert await task is ShardsHopeless
    assert [record["exit_code"] for record in stage.log.rest("shard died")] == [-9, 2]


async def test_without_restarts_the_death_of_the_only_shard_ends_it(stage: Stage) -> None:
    async with stage.playing(RestartPolicy(max_restarts=0, delays=(0.0,)), stage.shard(0)) as task:
        stage.kill(0)
        await stage.hear("router-stops")
        assert await task is ChildLost
    assert stage.words.count("shard-listens") == 1
    assert not stage.socket(0).exists()


async def test_without_restarts_the_death_of_the_last_shard_ends_it(stage: Stage) -> None:
    async with stage.playing(RestartPolicy(max_restarts=0, delays=(0.0,)), stage.shard(0), stage.shard(1)) as task:
        stage.kill(1)
        assert (await stage.log.next("shard died"))["restart_in_s"] is None
        assert not task.done()
        stage.kill(0)
        assert await task is ChildLost
    await stage.hear("router-stops")
    assert stage.words.count("shard-listens") == 2


async def test_a_stop_while_a_restart_is_waited_for_is_in_order_and_at_once(stage: Stage) -> None:
    async with stage.playing(RestartPolicy(delays=LATER), stage.shard(0), stage.shard(1)) as task:
        stage.kill(1)
        await stage.log.next("shard died")
        task.cancel()
        await stage.hear("shard-0 stops")
    assert task.cancelled()
    assert stage.words[-2:] == ["router-stops", "shard-0 stops"]


async def test_a_stop_while_a_shard_loads_again_stops_that_too(stage: Stage) -> None:
    async with stage.playing(RestartPolicy(delays=(0.0,)), stage.shard(0)) as task:
        stage.doom(0, "hangs")
        stage.kill(0)
        await stage.hear("shard-0 hangs")
        task.cancel()
        await stage.hear("shard-0 stops")
    assert stage.words[-2:] == ["router-stops", "shard-0 stops"]
    assert not psutil.pid_exists(stage.pids["shard-0"])


async def test_a_shard_that_dies_while_the_router_drains_is_started_again(stage: Stage) -> None:
    """The streams that the router waits for go on there."""
    drained = stage.folder / "drained"
    os.mkfifo(drained)
    stage.router_change = f"def drain():\n    open({str(drained)!r}).read()"
    async with stage.playing(RestartPolicy(delays=(0.0,)), stage.shard(0)) as task:
        task.cancel()
        await stage.hear("router-stops")
        stage.kill(0)
        await stage.log.next("shard serves again")
        await asyncio.to_thread(drained.write_text, "")
        await stage.hear("shard-0 stops")


async def test_a_restart_that_the_system_refuses_is_a_death_like_another(stage: Stage) -> None:
    shell = stage.folder / "sh"
    shell.symlink_to("/bin/sh")
    shard = stage.shard(0)
    shard = replace(shard, argv=(str(shell), "-c", 'exec "$0" "$@"', *shard.argv))
    async with stage.playing(RestartPolicy(max_restarts=1, delays=(0.0,)), shard) as task:
        shell.unlink()
        stage.kill(0)
        assert await task is ShardsHopeless
    assert "No such file" in str(stage.log.rest("shard cannot be started"))
