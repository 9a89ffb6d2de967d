"""Deaths and hangs of the router's processes: each is restarted alone, and the shards keep their weights. The real processes."""

from __future__ import annotations

import asyncio
import shutil
import signal
from collections import Counter
from contextlib import suppress
from pathlib import Path

import aiohttp
import psutil
import pytest
from full_grid import full
from stack import START_TIMEOUT, Stack, generate, running
from streams import Streams

from text_generation_common.exit_codes import ExitCode

pytestmark = pytest.mark.system

STREAMS = 24


async def until_logged(stack: Stack, event: str, *processes: str) -> None:
    """Wait until each process has logged this event, in any order."""
    while missing := [process for process in processes if event not in stack.events(process)]:
        await asyncio.to_thread(stack.wait_for, event, missing[0])


async def test_a_router_that_hangs_or_dies_is_restarted_until_it_cannot_start(
    echo_model: Path, session: aiohttp.ClientSession, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(echo_model, model, ignore=shutil.ignore_patterns("*.safetensors"))
    with running(model, "--hang-timeout", "4", "--max-shard-restarts", "3") as stack:
        shard = stack.shard(0).pid
        for fault, number in (("suspend", "SIGABRT"), ("kill", "SIGKILL")):
            getattr(stack.router()["router"], fault)()
            died = await asyncio.to_thread(stack.wait_for, "router died")
            assert (died["child"], died["signal"]) == ("router", number)
            await asyncio.to_thread(stack.wait_for, "router serves again")
            assert await generate(session, stack.url) == "one two three"
        assert "Fatal Python error: Aborted" in stack.output("router")
        assert stack.shard(0).pid == shard
        (model / "tokenizer.json").unlink()
        stack.router()["router"].kill()
        assert await asyncio.to_thread(stack.wait) == ExitCode.DEPENDENCY_LOST
        assert "cannot serve" in stack.events("router")
        assert stack.left_behind() == []


@pytest.mark.parametrize("fault", ["kill", full("suspend")])
async def test_an_http_worker_ends_alone_and_a_stop_loses_no_request(
    echo_model: Path, tmp_path: Path, fault: str
) -> None:
    """Also: streams go on over two deaths of the scheduler process; SIGHUP reaches all workers, and they stop before the
    scheduler process, which stops before the shard."""
    keys = tmp_path / "keys.toml"
    keys.write_text('[[keys]]\nkey = "old"\n[[keys]]\nkey = "new"')
    workers = ("http-worker-0", "http-worker-1")
    arguments = ("--http-workers", "2", "--echo-step-ms", "10", "--hang-timeout", "4", "--api-keys-file", str(keys))
    with running(echo_model, *arguments) as stack:
        before = stack.router()
        assert sorted(before) == [*workers, "router-scheduler"]
        assert loaded(before["http-worker-0"]) == {"aiohttp", "tokenizers"}
        assert loaded(before["router-scheduler"]) == set(), "it serves no HTTP and knows no text"
        async with aiohttp.ClientSession(headers={"x-api-key": "new"}) as session, asyncio.TaskGroup() as tasks:
            streams = Streams(session, tasks)
            await streams.open(stack.url, STREAMS, max_new_tokens=500)
            connections = {name: connected(before[name]) for name in workers}
            assert sum(connections.values()) == STREAMS
            victim = max(workers, key=lambda name: connections[name])
            getattr(before[victim], fault)()
            died = await asyncio.to_thread(stack.wait_for, "router died")
            assert (died["child"], died["restart_in_s"]) == (victim, 0.1)
            again = await asyncio.to_thread(stack.wait_for, "router serves again")
            assert again["child"] == victim
            for _ in range(2):
                stack.router()["router-scheduler"].kill()
                await asyncio.to_thread(stack.wait_for, "router serves again")
            await streams.all_ended()
        ends = Counter((stream.end, stream.tokens if stream.end == "finished" else 0) for stream in streams.streams)
        assert ends == {("closed", 0): connections[victim], ("finished", 500): STREAMS - connections[victim]}
        after = stack.router()
        assert len({stream.text for stream in streams.streams if stream.end == "finished"}) == 1
        assert {name for name in before if before[name].pid != after[name].pid} == {victim, "router-scheduler"}

        for text, event in (
            ('[[keys]]\nkey = "new"', "API keys read again"),
            ("[[keys", "API keys not read again: the old ones stay"),
        ):
            keys.write_text(text)
            stack.launcher.send_signal(signal.SIGHUP)
            await until_logged(stack, event, *workers)
        async with aiohttp.ClientSession(headers={"x-api-key": "new"}) as session, asyncio.TaskGroup() as tasks:
            async with session.get(f"{stack.url}/v1/models", headers={"x-api-key": "old"}) as response:
                assert response.status == 401
            streams = Streams(session, tasks)
            await streams.open(stack.url, STREAMS, max_new_tokens=100)
            stack.launcher.send_signal(signal.SIGTERM)
            await streams.all_ended()
        assert {(stream.end, stream.tokens) for stream in streams.streams} == {("finished", 100)}
        assert await asyncio.to_thread(stack.wait) == ExitCode.STOPPED
        stops = [record["process"] for record in stack.records if record["event"] in ("stopped", "session closed")]
        assert (sorted(stops[-5:-3]), sorted(stops[-3:])) == ([*workers], ["launcher", "router-scheduler", "shard-0"])
        assert stack.left_behind() == []


def connected(worker: psutil.Process) -> int:
    """Return the number of open TCP connections of a worker."""
    return sum(each.status == psutil.CONN_ESTABLISHED for each in worker.net_connections("tcp"))


def loaded(process: psutil.Process) -> set[str]:
    """Return the packages for HTTP and text whose compiled modules a process has loaded."""
    paths = [Path(each.path).parts for each in process.memory_maps()]
    return {name for name in ("aiohttp", "tokenizers") if any(name in parts for parts in paths)}


@pytest.mark.full
async def test_a_death_right_after_the_first_200_of_health_is_a_death(
    echo_model: Path, session: aiohttp.ClientSession
) -> None:
    """Other processes still start then, and the launcher has not said that it is ready."""
    stack = Stack(echo_model, "--http-workers", "2")
    try:
        await until_healthy(session, stack.url)
        killed = [*stack.router().values(), stack.shard(0)]
        for process in killed:
            process.kill()
        await asyncio.to_thread(psutil.wait_procs, killed)
        await asyncio.to_thread(stack.wait_for, "ready")
        await until_healthy(session, stack.url)  # on a busy machine it was ready before the deaths
        assert await generate(session, stack.url) == "one two three"
        assert "router failed to start" not in stack.events("launcher")
    finally:
        stack.close()


async def until_healthy(session: aiohttp.ClientSession, url: str) -> None:
    """Wait until /health is 200."""
    async with asyncio.timeout(3 * START_TIMEOUT):
        while True:
            with suppress(aiohttp.ClientError):
                async with session.get(f"{url}/health") as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(0.01)
