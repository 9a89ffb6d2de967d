"""Shards that die while serving: started again, tried again, given up. Small processes in the place of shard and router."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from dataclasses import replace

import psutil
import pytest
from keeper_stage import Stage, open_stage

from text_generation_launcher.child import ChildLost, ShardsHopeless
from text_generation_launcher.shard_restarts import RestartPolicy
from text_generation_proto.exit_codes import ExitCode

pytestmark = pytest.mark.system

LATER = (3600.0,)
"""Delays that no test lives to see the end of."""


@pytest.fixture
def stage() -> Iterator[Stage]:
    with open_stage() as stage:
        yield stage


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
    policy = RestartPolicy(max_restarts=1, delays=(0.0, 3600.0), stable_after=1e-6)
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
