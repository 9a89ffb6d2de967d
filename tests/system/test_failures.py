"""kill -9 of any process: streams end, nothing is left behind, shards are restarted. The real processes, echo engine."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from pathlib import Path

import aiohttp
import psutil
import pytest
from full_grid import full
from stack import generate, running, still_running
from streams import Streams

from text_generation_common.exit_codes import ExitCode

pytestmark = pytest.mark.system

JOINED = ("shard joined again", "router")
STREAMS = 64
MAX_END_S = 10.0
"""Seconds after the kill in which all streams and processes end, also on a busy machine: about one on an idle one."""
EXIT_CODES = {"launcher": -9, "router": ExitCode.DEPENDENCY_LOST, "shard": ExitCode.DEPENDENCY_LOST}


@pytest.mark.parametrize("victim", ["launcher", full("router"), full("shard")])
async def test_killed_process_ends_all_others(victim: str, echo_model: Path) -> None:
    """Router and shard: without restarts."""
    restarts = "1" if victim == "launcher" else "0"
    with running(echo_model, "--echo-step-ms", "10", "--max-shard-restarts", restarts, grammars=True) as stack:
        if victim == "launcher":  # whose restarted shard must not stay behind
            stack.kill("shard")
            await asyncio.to_thread(stack.wait_for, *JOINED)
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
    echo_model: Path, session: aiohttp.ClientSession
) -> None:
    with running(echo_model, "--num-replicas", "2") as stack:
        sockets = [Path(name).name for name in stack.left_behind() if Path(name).name.startswith("shard-")]
        assert sockets == ["shard-0", "shard-1"]
        for replica in (0, 1):  # the last request is answered by a restarted shard
            before = stack.shard(replica).pid
            stack.kill("shard", replica)
            died = await asyncio.to_thread(stack.wait_for, "shard died")
            assert (died["replica"], died["signal"], died["restart_in_s"]) == (replica, "SIGKILL", 0.1)
            assert await generate(session, stack.url) == "one two three"
            await asyncio.to_thread(stack.wait_for, *JOINED)
            assert stack.shard(replica).pid != before
        assert await generate(session, stack.url) == "one two three"
        children = stack.children()
        stack.kill("shard", 1)
        await asyncio.to_thread(stack.wait_for, "shard died")
        stack.launcher.send_signal(signal.SIGTERM)  # while a shard is down
        assert await asyncio.to_thread(stack.wait) == ExitCode.STOPPED
        assert await asyncio.to_thread(still_running, children, 5) == []
        assert stack.left_behind() == []
        again = [record["replica"] for record in stack.records if record["event"] == "shard serves again"]
        assert again in ([0, 1], [0, 1, 1]), "the last one may serve again before the router has stopped"


@pytest.mark.full
async def test_a_launcher_without_a_free_descriptor_restarts_its_shards(
    echo_model: Path, session: aiohttp.ClientSession
) -> None:
    with running(echo_model, "--num-replicas", "2") as stack:
        launcher = psutil.Process(stack.launcher.pid)
        used = set(map(int, os.listdir(f"/proc/{launcher.pid}/fd")))
        first_free = min(set(range(len(used) + 1)) - used)
        launcher.rlimit(psutil.RLIMIT_NOFILE, (first_free, first_free))
        killed = [stack.shard(replica) for replica in (0, 1)]
        for shard in killed:
            shard.kill()
        for _ in killed:
            await asyncio.to_thread(stack.wait_for, *JOINED)
        await generate(session, stack.url)
        assert launcher.num_fds() <= len(used)
        assert "shard cannot be started" not in stack.events("launcher")


@pytest.mark.full
async def test_a_shard_that_comes_back_without_its_model_does_not_count_as_serving(
    echo_model: Path, session: aiohttp.ClientSession, tmp_path: Path
) -> None:
    """The model folder is removed while serving, and comes back; when it is gone for good the launcher gives up."""
    model, away = tmp_path / "model", tmp_path / "away"
    shutil.copytree(echo_model, model, ignore=shutil.ignore_patterns("*.safetensors"))
    flags = ("--num-replicas", "2", "--echo-step-ms", "10", "--max-shard-restarts", "3")
    with running(model, *flags, grammars=True) as stack:
        async with asyncio.TaskGroup() as tasks:
            streams = Streams(session, tasks)
            await streams.open(stack.url, 8, max_new_tokens=300)
            model.rename(away)
            stack.kill("shard", 0)
            different = await asyncio.to_thread(stack.wait_for, "shard serves something else than before its restart")
            assert different["replica"] == 0
            assert different["reason"].startswith("its grammar_kinds is [], not [")
            died = await asyncio.to_thread(stack.wait_for, "shard died")
            assert (died["replica"], died["exit_code"], died["restart_in_s"]) == (0, ExitCode.FAILED, 0.5)
            async with session.get(f"{stack.url}/metrics") as response:
                assert "text_generation_replicas_serving 1" in await response.text()
            assert "shard serves again" not in stack.events("launcher")
            away.rename(model)
            await asyncio.to_thread(stack.wait_for, *JOINED)
            await streams.all_ended()
        assert {stream.end for stream in streams.streams} == {"finished"}
        assert await generate(session, stack.url) == "one two three"
        model.rename(away)
        for shard in [stack.shard(0), stack.shard(1)]:
            shard.kill()
        assert await asyncio.to_thread(stack.wait) == ExitCode.HOPELESS
        assert stack.records[-1]["exit_code"] == 76
        assert stack.left_behind() == []
        assert stack.events("launcher").count("shard serves again") == 1
