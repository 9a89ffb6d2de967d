"""Several replicas: the real processes with the echo engine. One dies, comes back, is given up."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import psutil
import pytest
from stack import Stack, running

from text_generation_proto.exit_codes import ExitCode

pytestmark = pytest.mark.system

TWO = ("--num-replicas", "2")


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
        yield session


async def generate(session: aiohttp.ClientSession, url: str) -> str:
    body = {"inputs": "one two three", "parameters": {"max_new_tokens": 3}}
    async with session.post(f"{url}/generate", json=body) as response:
        assert response.status == 200, await response.text()
        return str((await response.json())["generated_text"])


async def test_each_replica_is_a_process_with_a_socket_of_its_own(
    demo_model: Path, session: aiohttp.ClientSession
) -> None:
    with running(demo_model, *TWO) as stack:
        assert stack.shard(0).pid != stack.shard(1).pid
        sockets = [Path(name).name for name in stack.left_behind() if Path(name).name.startswith("shard-")]
        assert sockets == ["shard-0", "shard-1"]
        assert await generate(session, stack.url) == "one two three"
        stack.launcher.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(stack.wait) == ExitCode.STOPPED
        assert stack.left_behind() == []


async def test_a_killed_replica_comes_back_and_the_router_goes_on(
    demo_model: Path, session: aiohttp.ClientSession
) -> None:
    with running(demo_model, *TWO) as stack:
        for replica in (0, 1):  # in the end no request can be answered by a shard of the start
            before = stack.shard(replica).pid
            stack.kill("shard", replica)
            died = await asyncio.to_thread(stack.wait_for, "shard died")
            assert (died["replica"], died["signal"], died["restart_in_s"]) == (replica, "SIGKILL", 0.1)
            assert await generate(session, stack.url) == "one two three"
            await asyncio.to_thread(stack.wait_for, "shard serves again")
            assert stack.shard(replica).pid != before
        assert await generate(session, stack.url) == "one two three"


@pytest.mark.parametrize("moment", ["shard died", "shard serves again"])
def test_a_killed_launcher_leaves_nothing_behind_while_a_shard_is_down_or_new(moment: str, demo_model: Path) -> None:
    with running(demo_model, *TWO) as stack:
        stack.kill("shard", 1)
        stack.wait_for(moment)
        children = stack.children()
        stack.kill("launcher")
        _, alive = psutil.wait_procs(children, 5)
        assert [one for one in alive if one.is_running() and one.status() != psutil.STATUS_ZOMBIE] == []
        assert stack.wait() == -9
        assert stack.left_behind() == []


def test_a_stop_while_a_shard_is_down_is_a_stop(demo_model: Path) -> None:
    with running(demo_model, *TWO) as stack:
        children = stack.children()
        stack.kill("shard", 1)
        stack.wait_for("shard died")
        stack.launcher.send_signal(signal.SIGTERM)
        assert stack.wait() == ExitCode.STOPPED
        assert psutil.wait_procs(children, timeout=5)[1] == []
        assert stack.left_behind() == []


def test_a_shard_that_dies_again_and_again_is_given_up_with_an_exit_code_of_its_own(demo_model: Path) -> None:
    with running(demo_model, "--max-shard-restarts", "1") as stack:
        stack.kill("shard")
        stack.wait_for("shard serves again")
        stack.kill("shard")
        assert stack.wait() == ExitCode.HOPELESS
        assert stack.records[-1]["exit_code"] == 76
        assert stack.left_behind() == []


def test_more_replicas_than_devices_are_refused(demo_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    stack = Stack(demo_model, "--engine", "torch", *TWO)
    try:
        assert stack.wait() == ExitCode.USAGE
        assert stack.records[-2]["reason"].startswith("not enough cuda devices: 2 replicas")
    finally:
        stack.close()
