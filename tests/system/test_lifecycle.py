"""Start, serve, drain and stop: the real processes with the echo engine. tests/system/test_connections.py has the plain stop."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import aiohttp
import psutil
import pytest
from ports import free_port
from stack import Stack, running
from streams import Streams

pytestmark = pytest.mark.system

SLOW = ("--echo-step-ms", "20")


def failed_start(model: Path, *args: str) -> Stack:
    """Return the stack of a launcher that fails to start."""
    stack = Stack(model, *args)
    try:
        assert stack.wait() == 1
        assert "ready" not in stack.events("launcher")
        assert stack.left_behind() == []
    finally:
        stack.close()
    return stack


@pytest.mark.full
async def test_second_signal_does_not_wait_for_streams(echo_model: Path, session: aiohttp.ClientSession) -> None:
    """The shard's socket is at a given path: a stale socket is removed before, a served one is kept.

    A shard that is lost while the server stops does not change the exit code.
    """
    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        path = Path(folder, "shard")
        with socket.socket(socket.AF_UNIX) as crashed:
            crashed.bind(f"{path}-0")
        with running(echo_model, *SLOW, "--shard-uds-path", str(path), "--max-shard-restarts", "0") as stack:
            second = await asyncio.to_thread(failed_start, echo_model, "--shard-uds-path", str(path))
            assert second.records[-2]["reason"] == f"a server already listens on {path}-0"
            loop = asyncio.get_running_loop()
            async with asyncio.TaskGroup() as tasks:
                streams = Streams(session, tasks)
                await streams.open(stack.url, 4, max_new_tokens=3000)  # a minute
                stack.launcher.send_signal(signal.SIGTERM)
                await asyncio.to_thread(stack.wait_for, "stopping")
                stack.kill("shard")
                await asyncio.to_thread(stack.wait_for, "shard died")
                forced = loop.time()
                stack.launcher.send_signal(signal.SIGTERM)
                await streams.all_ended()
            assert all(stream.end in ("error", "closed") for stream in streams.streams)
            assert await asyncio.to_thread(stack.wait) == 0
            assert loop.time() - forced < 10
            assert stack.left_behind() == os.listdir(folder) == []


async def test_drain_ends_after_the_graceful_termination_timeout(
    echo_model: Path, session: aiohttp.ClientSession
) -> None:
    """The shard listens on a TCP port."""
    port = free_port()
    with running(echo_model, *SLOW, "-g", "1", "--shard-tcp-port", str(port)) as stack:
        (serving,) = (record for record in stack.records if record["event"] == "serving")
        assert serving["address"] == f"127.0.0.1:{port}"
        async with asyncio.TaskGroup() as tasks:
            streams = Streams(session, tasks)
            await streams.open(stack.url, 4, max_new_tokens=3000)
            stack.launcher.send_signal(signal.SIGINT)
            await streams.all_ended()
        assert [stream.end for stream in streams.streams] == ["error"] * 4
        assert await asyncio.to_thread(stack.wait) == 0


def test_signal_during_the_start_stops(echo_model: Path) -> None:
    stack = Stack(echo_model)
    try:
        stack.wait_for("starting")
        stack.launcher.send_signal(signal.SIGHUP)
        assert stack.wait() == 0
        assert stack.left_behind() == []
    finally:
        stack.close()


@pytest.mark.parametrize(
    ("program", "flags", "last"),
    [("launcher", ["--model-id", "/nowhere"], "stopped"), ("router", ["--model-path", "/nowhere"], "cannot serve")],
)
def test_signals_at_the_end_leave_the_exit_code(program: str, flags: list[str], last: str) -> None:
    command = [sys.executable, "-P", "-m", f"text_generation_{program}", *flags, "--json-output", "--port", "3001"]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        while json.loads(process.stderr.readline())["event"] != last:
            pass
        for sig in itertools.cycle((signal.SIGTERM, signal.SIGINT)):
            process.send_signal(sig)
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.002)
                break
        assert process.returncode == 1
        assert process.stderr.read() == b""


def test_shard_that_cannot_start_fails_the_start(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")  # which is refused before transformers is imported
    assert "shard failed to start" in failed_start(tmp_path, "--engine", "torch").events("launcher")


def test_router_that_cannot_start_fails_the_start(tmp_path: Path) -> None:
    # The folder has no tokenizer.
    assert "router failed to start" in failed_start(tmp_path).events("launcher")


@pytest.mark.full
def test_http_workers_take_the_port_before_they_listen_and_leave_no_file(echo_model: Path) -> None:
    first = Stack(echo_model, "--http-workers", "2")
    try:
        first.wait_for("loading", "shard-0")
        second = failed_start(echo_model, "--http-workers", "2", "--port", first.url.rpartition(":")[2])
        first.wait_for("ready")
        children = first.children()
        first.kill("launcher")
        assert psutil.wait_procs(children, timeout=30)[1] == []
        assert first.left_behind() == []
    finally:
        first.close()
    assert "cannot listen on 127.0.0.1 port" in second.records[-2]["reason"]
    assert second.events("shard-0") == []
