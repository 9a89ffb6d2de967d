"""Start, serve, drain, stop: the real processes with the echo engine."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import psutil
import pytest
from stack import Stack, running
from streams import Streams

pytestmark = pytest.mark.system

SLOW = ("--echo-step-ms", "20")


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
        yield session


async def generate(session: aiohttp.ClientSession, url: str) -> str:
    body = {"inputs": "one two three", "parameters": {"max_new_tokens": 3}}
    async with session.post(f"{url}/generate", json=body) as response:
        assert response.status == 200, await response.text()
        return str((await response.json())["generated_text"])


async def test_ready_means_that_a_request_succeeds(demo_model: Path, session: aiohttp.ClientSession) -> None:
    with running(demo_model) as stack:
        assert await generate(session, stack.url) == "one two three"
        assert stack.records[-1]["url"] == stack.url
        assert stack.events("launcher")[-1] == "ready"


async def test_sigterm_lets_running_streams_finish(demo_model: Path, session: aiohttp.ClientSession) -> None:
    with running(demo_model, *SLOW) as stack:
        children = stack.children()
        async with asyncio.TaskGroup() as tasks:
            streams = Streams(session, tasks)
            await streams.open(stack.url, 16, max_new_tokens=50)
            stack.launcher.send_signal(signal.SIGTERM)
            await streams.all_ended()
        assert {(stream.end, stream.tokens) for stream in streams.streams} == {("finished", 50)}
        assert await asyncio.to_thread(stack.wait) == 0
        assert psutil.wait_procs(children, timeout=5)[1] == []
        assert stack.left_behind() == []


async def test_a_second_signal_does_not_wait_for_streams(demo_model: Path, session: aiohttp.ClientSession) -> None:
    with running(demo_model, *SLOW) as stack:
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as tasks:
            streams = Streams(session, tasks)
            await streams.open(stack.url, 4, max_new_tokens=3000)  # a minute
            stack.launcher.send_signal(signal.SIGTERM)
            await asyncio.to_thread(stack.wait_for, "stopping")
            hurried = loop.time()
            stack.launcher.send_signal(signal.SIGTERM)
            await streams.all_ended()
        assert all(stream.end in ("error", "closed") for stream in streams.streams)
        assert await asyncio.to_thread(stack.wait) == 0
        assert loop.time() - hurried < 10
        assert stack.left_behind() == []


async def test_the_drain_has_an_end(demo_model: Path, session: aiohttp.ClientSession) -> None:
    with running(demo_model, *SLOW, "-g", "1") as stack:
        async with asyncio.TaskGroup() as tasks:
            streams = Streams(session, tasks)
            await streams.open(stack.url, 4, max_new_tokens=3000)
            stack.launcher.send_signal(signal.SIGINT)
            await streams.all_ended()
        assert [stream.end for stream in streams.streams] == ["error"] * 4  # each was told
        assert await asyncio.to_thread(stack.wait) == 0


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_stop_while_starting_is_a_stop(demo_model: Path, sig: signal.Signals) -> None:
    stack = Stack(demo_model)
    try:
        stack.wait_for("starting")
        stack.launcher.send_signal(sig)
        assert stack.wait() == 0
        assert stack.left_behind() == []
    finally:
        stack.close()


def test_a_shard_that_cannot_start_fails_the_start(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no-such-model"}')
    stack = Stack(tmp_path, "--engine", "torch")
    try:
        assert stack.wait() == 1
        assert "shard failed to start" in stack.events("launcher")
        assert "ready" not in stack.events("launcher")
        assert stack.left_behind() == []
    finally:
        stack.close()


def test_a_router_that_cannot_start_fails_the_start(tmp_path: Path) -> None:
    stack = Stack(tmp_path)  # no tokenizer there
    try:
        assert stack.wait() == 1
        assert "router failed to start" in stack.events("launcher")
        assert stack.left_behind() == []
    finally:
        stack.close()


def test_a_port_that_is_taken_is_said_at_once(demo_model: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        stack = Stack(demo_model, "--port", str(other.getsockname()[1]))
        try:
            assert stack.wait() == 1
            assert "cannot listen on 127.0.0.1 port" in stack.records[-2]["reason"]
            assert stack.events("shard-0") == []
        finally:
            stack.close()


def test_an_engine_without_a_model_has_nothing_to_cut(demo_model: Path) -> None:
    stack = Stack(demo_model, "--num-shard", "2")
    try:
        assert stack.wait() == 2
        assert "the echo engine has no model to split" in stack.records[-2]["reason"]
    finally:
        stack.close()


async def test_a_socket_left_by_a_crash_makes_way(demo_model: Path, session: aiohttp.ClientSession) -> None:
    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        path = Path(folder, "sock")
        with socket.socket(socket.AF_UNIX) as crashed:
            crashed.bind(f"{path}-0")
        with running(demo_model, "--shard-uds-path", str(path)) as stack:
            assert await generate(session, stack.url) == "one two three"
        assert os.listdir(folder) == []


async def test_a_socket_that_is_served_is_not_taken(demo_model: Path, session: aiohttp.ClientSession) -> None:
    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        path = str(Path(folder, "sock"))
        with running(demo_model, "--shard-uds-path", path) as first:
            second = Stack(demo_model, "--shard-uds-path", path)
            try:
                assert second.wait() == 1
                assert second.records[-2]["reason"] == f"a server already listens on {path}-0"
            finally:
                second.close()
            assert await generate(session, first.url) == "one two three"


async def test_shards_listen_on_tcp_if_asked(demo_model: Path, session: aiohttp.ClientSession) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with running(demo_model, "--shard-tcp-port", str(port)) as stack:
        assert await generate(session, stack.url) == "one two three"
        (serving,) = (record for record in stack.records if record["event"] == "serving")
        assert serving["address"] == f"127.0.0.1:{port}"
