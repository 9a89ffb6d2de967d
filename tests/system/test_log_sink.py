"""A log that cannot be written costs log lines, counted, and nothing else: no request, no signal, no process."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from full_grid import full
from stack import Stack, still_running

pytestmark = pytest.mark.system

REQUESTS = 800
"""Their lines fill the pipes between the router and the reader of the log, 64 kB each."""
MANY_REQUESTS = 4800
"""Their lines fill the queue of the router, too, 1 MiB."""
CLIENTS = 8
KEY = {"authorization": "Bearer sk-one"}


class Server(Stack):
    """A server whose log is a file or a pipe that a test can break."""

    def __init__(self, model: Path, folder: Path, fault: str) -> None:
        self.fault = fault
        self.log = folder / "log"
        reader, writer = os.pipe()
        self.reader = os.fdopen(reader)
        if fault == "full":
            os.close(writer)
            writer = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        super().__init__(model, environ={"API_KEY": "sk-one"}, stderr=writer)
        os.close(writer)

    def break_log(self) -> None:
        """Make the log fail. A pipe is never read, and so stalls when it is full."""
        if self.fault == "full":
            resource.prlimit(self.launcher.pid, resource.RLIMIT_FSIZE, (self.log.stat().st_size, -1))
        elif self.fault == "closed":
            self.reader.close()
        elif self.fault == "launcher stopped":
            self.launcher.send_signal(signal.SIGSTOP)

    def mend_log(self) -> None:
        """Let the log work again, unless its reader is gone."""
        if self.fault == "full":
            resource.prlimit(self.launcher.pid, resource.RLIMIT_FSIZE, (-1, -1))
        elif self.fault == "launcher stopped":
            self.launcher.send_signal(signal.SIGCONT)

    def close(self) -> None:
        super().close()
        self.reader.close()


@contextmanager
def server(model: Path, folder: Path, fault: str) -> Iterator[Server]:
    server = Server(model, folder, fault)
    try:
        yield server
    finally:
        if server.launcher.poll() is None:
            server.mend_log()
        server.close()


async def until_healthy(session: aiohttp.ClientSession, url: str) -> None:
    async with asyncio.timeout(60):
        while True:
            try:
                async with session.get(f"{url}/health"):
                    return
            except aiohttp.ClientConnectorError:
                await asyncio.sleep(0.1)


async def dropped_by_router(session: aiohttp.ClientSession, url: str) -> float:
    async with session.get(f"{url}/metrics", headers=KEY) as response:
        lines = (await response.text()).splitlines()
    return sum(float(line.split()[1]) for line in lines if line.startswith("text_generation_log_lines_dropped_total "))


def records(log: Path, event: str) -> list[dict[str, Any]]:
    lines = log.read_text().splitlines()
    return [record for line in lines if line.endswith("}") and (record := json.loads(line))["event"] == event]


async def reported(log: Path) -> dict[str, Any]:
    async with asyncio.timeout(30):
        while not (reports := records(log, "log lines dropped")):  # noqa: ASYNC110 - a file has no event
            await asyncio.sleep(0.05)
    return reports[0]


@pytest.mark.parametrize("fault", ["full", *map(full, ("stalled", "closed", "launcher stopped"))])
async def test_a_broken_log_costs_lines_only(
    fault: str, echo_model: Path, session: aiohttp.ClientSession, tmp_path: Path
) -> None:
    with server(echo_model, tmp_path, fault) as stack:
        await until_healthy(session, stack.url)
        stack.break_log()
        statuses: list[int] = []
        requests = MANY_REQUESTS if fault == "launcher stopped" else REQUESTS

        async def ask() -> None:
            for number in range(requests // CLIENTS):
                headers = {"x-request-id": "r" * 128, **({} if number % 8 == 0 else KEY)}
                async with session.post(f"{stack.url}/tokenize", json={"inputs": "a"}, headers=headers) as response:
                    statuses.append(response.status)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(CLIENTS):
                tasks.create_task(ask())
        refused = CLIENTS * len(range(0, requests // CLIENTS, 8))
        assert (statuses.count(200), statuses.count(401)) == (requests - refused, refused)
        if fault == "full":
            stack.mend_log()
            report = await reported(stack.log)
            assert report["process"] == "launcher"
            assert report["lines"] > requests // 2
        if fault == "launcher stopped":
            assert await dropped_by_router(session, stack.url) > 0
            stack.mend_log()
        children = stack.children()
        stack.launcher.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(stack.launcher.wait, 30) == 0
        assert await asyncio.to_thread(still_running, children, 1) == []
        if fault == "full":
            assert records(stack.log, "stopped")[-1]["process"] == "launcher"
