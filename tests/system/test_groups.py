"""Replicas of several shards: they serve together and die together. Small processes in the place of shards and router."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator

import psutil
import pytest
from keeper_stage import Stage, open_stage

from text_generation_launcher import shard_group
from text_generation_launcher.child import ChildFailed, ShardsHopeless
from text_generation_launcher.plan import ShardSpec
from text_generation_launcher.shard_restarts import RestartPolicy
from text_generation_launcher.shutdown import GracefulShutdown
from text_generation_launcher.supervisor import Supervisor
from text_generation_proto.exit_codes import ExitCode

pytestmark = pytest.mark.system

AT_ONCE = RestartPolicy(delays=(0.0,))
SERVE = ("shard-0-rank-0 serves", "shard-0-rank-1 serves")
STUBBORN = """
import signal
serving = serve
async def serve(health, stop):
    asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    await serving(health, stop)
"""
"""Hangs in a collective, as it were: SIGTERM does nothing."""


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    monkeypatch.setattr(shard_group, "FAREWELL", 0.3)
    monkeypatch.setattr(shard_group, "BROKEN_GRACE", 0.3)
    with open_stage() as stage:
        yield stage


def pair(stage: Stage, change: str = "") -> tuple[ShardSpec, ShardSpec]:
    """A replica of two; `change` is of rank 0."""
    return stage.member(0, 0, change), stage.member(0, 1)


async def test_a_group_that_loses_a_process_is_started_again_whole(stage: Stage) -> None:
    async with stage.playing(AT_ONCE, *pair(stage), stage.shard(1)):
        first = dict(stage.pids)
        stage.kill("0-rank-0")
        died = await stage.log.next("shard died")
        assert (died["replica"], died["rank"], died["signal"], died["restart_in_s"]) == (0, 0, "SIGKILL", 0.0)
        await stage.hear("shard-0-rank-1 stops", *SERVE)
        assert (await stage.log.next("shard serves again"))["replica"] == 0
        assert {name for name in first if stage.pids[name] == first[name]} == {"shard-1"}
        assert [name for name in first if psutil.pid_exists(first[name])] == ["shard-1"]
        assert "router-stops" not in stage.words


async def test_one_that_hangs_when_its_group_breaks_is_killed(stage: Stage) -> None:
    async with stage.playing(AT_ONCE, *pair(stage, STUBBORN)):
        stuck = stage.pids["shard-0-rank-0"]
        stage.kill("0-rank-1")
        assert (await stage.log.next("child killed"))["child"] == "shard-0-rank-0"
        await stage.hear(*SERVE)
        assert not psutil.pid_exists(stuck)
        assert "shard-0-rank-0 stops" not in stage.words
        stage.kill("0-rank-0")  # the end of the test need not wait for it


async def test_what_broke_the_group_is_told_and_not_what_followed(stage: Stage) -> None:
    """Rank 0 sees that the other is gone, and ends by itself before the launcher has seen either."""
    lifeline = stage.folder / "lifeline"
    os.mkfifo(lifeline)
    follows = f"""
import threading
def follow():
    open({str(lifeline)!r}).read()
    os._exit({int(ExitCode.BUG)})
threading.Thread(target=follow, daemon=True).start()
"""
    holds = f"held = open({str(lifeline)!r}, 'w')"
    async with stage.playing(AT_ONCE, stage.member(0, 0, follows), stage.member(0, 1, holds)):
        stage.kill("0-rank-1")
        died = await stage.log.next("shard died")
        assert (died["rank"], died["exit_code"]) == (1, -9)
        assert stage.log.rest("child killed") == []
        await stage.hear(*SERVE)


async def test_a_replica_serves_once_all_its_shards_do(stage: Stage) -> None:
    gate = stage.folder / "gate"
    os.mkfifo(gate)
    waits = f"serving = serve\nasync def serve(*args): await asyncio.to_thread(open({str(gate)!r}).read); await serving(*args)"
    supervisor = Supervisor(
        stage.plan(stage.member(0, 0), stage.member(0, 1, waits)), GracefulShutdown(), AT_ONCE, json_output=False
    )
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(supervisor.run())
        await stage.hear("shard-0-rank-0 serves")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(stage.log.next("shards serve"), 0.3)
        await asyncio.to_thread(gate.write_text, "")
        await stage.hear("router-listens")
        task.cancel()
    assert "shard-0-rank-1 serves" in " ".join(stage.words)


async def test_the_deaths_of_a_group_are_counted_as_one_row(stage: Stage) -> None:
    async with stage.playing(RestartPolicy(max_restarts=1, delays=(0.0,)), *pair(stage)) as task:
        stage.kill("0-rank-0")
        await stage.hear(*SERVE)
        stage.kill("0-rank-1")
        assert await task is ShardsHopeless
    assert [record["rank"] for record in stage.log.rest("shard died")] == [0, 1]


async def test_the_sockets_of_a_dead_group_are_gone_before_the_next_one_starts(stage: Stage) -> None:
    (stage.folder / "g0").touch()  # as by a leader that was killed before all had come
    async with stage.playing(RestartPolicy(delays=(3600.0,)), *pair(stage), stage.shard(1)):
        stage.kill("0-rank-1")
        await stage.log.next("shard died")
        assert sorted(path.name for path in stage.folder.iterdir() if path.name[0] in "sg") == ["s1"]


async def test_a_group_one_of_which_cannot_start_fails_the_start(stage: Stage) -> None:
    stage.doom("0-1", 1)
    with pytest.raises(ExceptionGroup) as error:
        await Supervisor(stage.plan(*pair(stage)), GracefulShutdown(), AT_ONCE, json_output=False).run()
    assert error.group_contains(ChildFailed, match="shard-0-rank-1")
    failed = await stage.log.next("shard failed to start")
    assert (failed["replica"], failed["rank"], failed["exit_code"]) == (0, 1, 1)


async def test_a_group_is_stopped_in_order_and_with_patience(stage: Stage) -> None:
    """The short time that a broken group has is not for one that was asked to stop."""
    slow = "import time; before = say\ndef say(word):\n    if word.endswith('stops'): time.sleep(0.6)\n    before(word)"
    async with stage.playing(AT_ONCE, *pair(stage, slow)) as task:
        task.cancel()
        await stage.hear("shard-0-rank-0 stops", "shard-0-rank-1 stops")
    assert task.cancelled()
    assert stage.log.rest("child killed") == []
