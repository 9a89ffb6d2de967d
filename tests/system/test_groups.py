"""Replicas of several shards start and end together. With fake shards and router."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator

import psutil
import pytest
from fake_children import FakeServer, exit_code, fake_server

from text_generation_common import heartbeat
from text_generation_common.exit_codes import ExitCode
from text_generation_launcher import units
from text_generation_launcher.plan import ShardSpec
from text_generation_launcher.restarts import RestartPolicy

pytestmark = pytest.mark.system

AT_ONCE = RestartPolicy(delays=(0.0,))
SERVE = ("shard-0-rank-0 serves", "shard-0-rank-1 serves")
STUBBORN = """
import signal
serving = serve
async def serve(stop):
    asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    await serving(stop)
"""
"""Ignores SIGTERM, like a rank that waits in a collective."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    monkeypatch.setattr(units, "FAREWELL", 0.3)
    monkeypatch.setattr(units, "BROKEN_GRACE", 0.3)
    with fake_server() as server:
        yield server


def pair(server: FakeServer, change: str = "") -> tuple[ShardSpec, ShardSpec]:
    """Return the two ranks of replica 0; `change` applies to rank 0."""
    return server.shard(0, 0, change), server.shard(0, 1)


async def test_group_that_loses_a_shard_is_restarted_as_a_whole(server: FakeServer) -> None:
    policy = RestartPolicy(delays=(0.0, 3600.0), stable_after=3600.0)
    async with server.running(policy, *pair(server), server.shard(1)):
        first = dict(server.pids)
        server.kill("0-rank-0")
        died = await server.log.next("shard died")
        assert (died["replica"], died["rank"], died["signal"], died["restart_in_s"]) == (0, 0, "SIGKILL", 0.0)
        await server.wait_for("shard-0-rank-1 stops", *SERVE)
        again = await server.log.next("shard serves again")
        assert (again["replica"], again["seconds"] > 0) == (0, True)
        assert {name for name in first if server.pids[name] == first[name]} == {"shard-1", "router-listens"}
        assert [name for name in first if psutil.pid_exists(first[name])] == ["shard-1", "router-listens"]
        # The sockets of a dead group are removed before its restart.
        (server.folder / "g0").touch()  # left by a leader that was killed while the group gathered
        server.kill("0-rank-1")
        assert (await server.log.next("shard died"))["restart_in_s"] == 3600.0
        assert sorted(path.name for path in server.folder.iterdir() if path.name[0] in "sg") == ["s1"]
        assert "router-stops" not in server.messages


async def test_shard_that_ignores_sigterm_in_a_broken_group_is_killed(server: FakeServer) -> None:
    async with server.running(AT_ONCE, *pair(server, STUBBORN)):
        stuck = server.pids["shard-0-rank-0"]
        server.kill("0-rank-1")
        async with asyncio.timeout(10):  # less than the stop timeout
            assert (await server.log.next("child killed"))["child"] == "shard-0-rank-0"
        await server.wait_for(*SERVE)
        assert not psutil.pid_exists(stuck)
        assert "shard-0-rank-0 stops" not in server.messages
        server.kill("0-rank-0")  # so that the test ends at once


async def test_all_ranks_of_a_group_that_hangs_log_their_stacks(
    server: FakeServer, capfd: pytest.CaptureFixture[str]
) -> None:
    """A rank that hangs in a collective may wait for another one."""
    gate = server.folder / "gate"
    os.mkfifo(gate)
    hangs = f"""
import faulthandler, threading
faulthandler.enable()
def hang():
    open({str(gate)!r}).read()
    os.write(int(os.environ[{heartbeat.VARIABLE!r}]), {heartbeat.STUCK!r})
threading.Thread(target=hang, daemon=True).start()
"""
    async with server.running(
        AT_ONCE, server.shard(0, 0, hangs), server.shard(0, 1, "import faulthandler; faulthandler.enable()")
    ):
        await asyncio.to_thread(gate.write_text, "")
        assert (await server.log.next("child hangs"))["child"] == "shard-0-rank-0"
        assert (await server.log.next("shard died"))["signal"] == "SIGABRT"
        await server.wait_for(*SERVE)
        written = capfd.readouterr().err
        assert [rank for rank in (0, 1) if f"shard-0-rank-{rank}: Fatal Python error: Aborted" in written] == [0, 1]


async def test_the_first_exit_is_logged_not_its_consequence(server: FakeServer) -> None:
    """Rank 0 notices the death of rank 1 and exits before the launcher has seen either."""
    lifeline = server.folder / "lifeline"
    os.mkfifo(lifeline)
    follows = f"""
import threading
def follow():
    open({str(lifeline)!r}).read()
    os._exit({int(ExitCode.BUG)})
threading.Thread(target=follow, daemon=True).start()
"""
    holds = f"held = open({str(lifeline)!r}, 'w')"
    policy = RestartPolicy(max_restarts=1, delays=(0.0,), stable_after=3600.0)
    async with server.running(policy, server.shard(0, 0, follows), server.shard(0, 1, holds)) as task:
        server.kill("0-rank-1")
        died = await server.log.next("shard died")
        assert (died["rank"], died["exit_code"]) == (1, -9)
        assert server.log.rest("child killed") == []
        await server.wait_for(*SERVE)
        # The deaths of different ranks belong to one failure streak.
        server.kill("0-rank-0")
        assert await task is ExitCode.HOPELESS
    assert [record["rank"] for record in server.log.rest("shard died")] == [0]


async def test_replica_serves_when_all_its_shards_serve_and_stops_with_the_full_grace_period(
    server: FakeServer,
) -> None:
    gate = server.folder / "gate"
    os.mkfifo(gate)
    waits = f"serving = serve\nasync def serve(*args): await asyncio.to_thread(open({str(gate)!r}).read); await serving(*args)"
    slow = "import time; before = say\ndef say(word):\n    if word.endswith('stops'): time.sleep(0.6)\n    before(word)"
    supervisor = server.supervisor(AT_ONCE, server.shard(0, 0, slow), server.shard(0, 1, waits))
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(supervisor.run())
        await server.wait_for("shard-0-rank-0 serves")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(server.log.next("shards serve"), 0.3)
        await asyncio.to_thread(gate.write_text, "")
        await server.wait_for("router-listens")
        task.cancel()
        await server.wait_for("shard-0-rank-0 stops", "shard-0-rank-1 stops")
    assert "shard-0-rank-1 serves" in " ".join(server.messages)
    assert server.log.rest("child killed") == [], "the grace period of a broken group is shorter"


async def test_group_with_a_shard_that_cannot_start_fails_the_start(
    server: FakeServer, capfd: pytest.CaptureFixture[str]
) -> None:
    dies = "async def serve(stop): print('no such weights', flush=True); sys.exit(4)"
    supervisor = server.supervisor(AT_ONCE, server.shard(0, 0), server.shard(0, 1, dies))
    assert await exit_code(supervisor) is ExitCode.FAILED
    failed = await server.log.next("shard failed to start")
    assert (failed["replica"], failed["rank"], failed["exit_code"]) == (0, 1, 4)
    assert "shard-0-rank-1: no such weights" in capfd.readouterr().err


async def test_the_ranks_of_a_later_node_are_served_and_restarted(server: FakeServer) -> None:
    """The launcher of node 1 has ranks 2 and 3 of a replica, and not the first two."""
    async with server.running(AT_ONCE, server.shard(0, 2), server.shard(0, 3)):
        server.kill("0-rank-3")
        assert (await server.log.next("shard died"))["rank"] == 3
        await server.log.next("shard serves again")
