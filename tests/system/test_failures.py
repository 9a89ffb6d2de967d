"""kill -9 of any process: streams end, nothing is left behind, shards are restarted. The real processes, echo engine."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import aiohttp
import psutil
import pytest
from stack import generate, running
from streams import Streams

from text_generation_proto.exit_codes import ExitCode

pytestmark = pytest.mark.system

TWO_REPLICAS = ("--num-replicas", "2")
STREAMS = 64
MAX_END_S = 2.0
"""Seconds after the kill in which all streams and processes end."""
EXIT_CODES = {"launcher": -9, "router": ExitCode.DEPENDENCY_LOST, "shard": ExitCode.DEPENDENCY_LOST}


def still_running(processes: list[psutil.Process], timeout: float) -> list[psutil.Process]:
    """Wait for processes to end; return the others. A zombie has ended: its new parent has not waited for it yet."""
    _, alive = psutil.wait_procs(processes, timeout)
    return [process for process in alive if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize("victim", ["launcher", "router", "shard"])
async def test_killed_process_ends_all_others(victim: str, demo_model: Path) -> None:
    with running(demo_model, "--echo-step-ms", "10", "--max-shard-restarts", "0") as stack:
        loop = asyncio.get_running_loop()
        async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as tasks:
            streams = Streams(session, tasks)
            await streams.open(stack.url, STREAMS, max_new_tokens=6000)  # a minute
            assert all(stream.end is None for stream in streams.streams)
            children = stack.children()
            # The shard, the router, and its four workers: two for templates, two for grammars.
            assert len(children) == 6
            stack.kill(victim)
            killed = loop.time()
            await streams.all_ended()
        assert {stream.end for stream in streams.streams} <= {"error", "closed"}
        assert max(stream.ended_at for stream in streams.streams) - killed < MAX_END_S
        assert await asyncio.to_thread(still_running, children, killed + MAX_END_S - loop.time()) == []
        assert await asyncio.to_thread(stack.wait) == EXIT_CODES[victim]
        assert stack.left_behind() == []
        if victim != "launcher":
            assert f"{victim} died" in stack.events("launcher")


async def test_killed_replicas_are_restarted_while_the_router_serves(
    demo_model: Path, session: aiohttp.ClientSession
) -> None:
    with running(demo_model, *TWO_REPLICAS) as stack:
        sockets = [Path(name).name for name in stack.left_behind() if Path(name).name.startswith("shard-")]
        assert sockets == ["shard-0", "shard-1"]
        for replica in (0, 1):  # the last request is answered by a restarted shard
            before = stack.shard(replica).pid
            stack.kill("shard", replica)
            died = await asyncio.to_thread(stack.wait_for, "shard died")
            assert (died["replica"], died["signal"], died["restart_in_s"]) == (replica, "SIGKILL", 0.1)
            assert await generate(session, stack.url) == "one two three"
            await asyncio.to_thread(stack.wait_for, "shard serves again")
            assert stack.shard(replica).pid != before
        assert await generate(session, stack.url) == "one two three"
        stack.launcher.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(stack.wait) == ExitCode.STOPPED
        assert stack.left_behind() == []


def test_killed_launcher_leaves_nothing_behind_after_a_restart(demo_model: Path) -> None:
    with running(demo_model, *TWO_REPLICAS) as stack:
        stack.kill("shard", 1)
        stack.wait_for("shard serves again")
        children = stack.children()
        stack.kill("launcher")
        assert still_running(children, 5) == []
        assert stack.wait() == -9
        assert stack.left_behind() == []


def test_stop_while_a_shard_is_down(demo_model: Path) -> None:
    with running(demo_model, *TWO_REPLICAS) as stack:
        children = stack.children()
        stack.kill("shard", 1)
        stack.wait_for("shard died")
        stack.launcher.send_signal(signal.SIGTERM)
        assert stack.wait() == ExitCode.STOPPED
        assert still_running(children, 5) == []
        assert stack.left_behind() == []


def test_hopeless_shards_have_their_own_exit_code(demo_model: Path) -> None:
    with running(demo_model, "--max-shard-restarts", "1") as stack:
        stack.kill("shard")
        stack.wait_for("shard serves again")
        stack.kill("shard")
        assert stack.wait() == ExitCode.HOPELESS
        assert stack.records[-1]["exit_code"] == 76
        assert stack.left_behind() == []
