"""Attacks on connections, and rolling restarts: the real processes with the echo engine."""

from __future__ import annotations

import asyncio
import itertools
import json
import resource
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import aiohttp
import psutil
import pytest
from stack import Stack, running

pytestmark = pytest.mark.system

HEADERS = b"POST /generate_stream HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
PERMITS = 8


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def router(stack: Stack) -> psutil.Process:
    (process,) = (child for child in stack.children() if "text_generation_router" in child.cmdline())
    return process


def port_of(stack: Stack) -> int:
    return int(stack.url.rpartition(":")[2])


def stream_request(tokens: int) -> bytes:
    body = json.dumps({"inputs": "one two three", "parameters": {"max_new_tokens": tokens}}).encode()
    return HEADERS + b"content-length: %d\r\n\r\n" % len(body) + body


@contextmanager
def attackers(stack: Stack, sent: bytes, count: int, window: int = 0) -> Iterator[list[socket.socket]]:
    """Open connections that send this and nothing more; `window`: bytes that their system takes ahead of them."""
    opened = []
    try:
        for _ in range(count):
            opened.append(connection := socket.socket())
            if window:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
            connection.connect(("127.0.0.1", port_of(stack)))
            connection.sendall(sent)
            connection.setblocking(False)
        yield opened
    finally:
        for connection in opened:
            connection.close()


def left(connections: list[socket.socket]) -> int:
    """Read what has arrived; return the number of connections that the server has not closed."""
    open_ones = 0
    for connection in connections:
        try:
            while connection.recv(1 << 16):
                pass
        except BlockingIOError:
            open_ones += 1
        except ConnectionError:
            pass
    return open_ones


class Probe:
    """A stream, and requests of /health and /metrics, beside an attack."""

    def __init__(self) -> None:
        self.gaps: list[float] = []
        """Seconds between two events of the stream."""
        self.failed: list[str] = []
        self.asked = 0

    async def stream(self, session: aiohttp.ClientSession, url: str) -> None:
        body = {"inputs": "one two three", "parameters": {"max_new_tokens": 5000}}
        loop = asyncio.get_running_loop()
        async with session.post(f"{url}/generate_stream", json=body) as response:
            last = 0.0
            async for line in response.content:
                if line.startswith(b"data:"):
                    if last:
                        self.gaps.append(loop.time() - last)
                    last = loop.time()

    async def ask(self, url: str) -> None:
        for path in itertools.cycle(("/health", "/health/live", "/metrics")):
            try:
                timeout = aiohttp.ClientTimeout(total=5)
                async with aiohttp.request("GET", url + path, timeout=timeout) as response:
                    if response.status != 200:
                        self.failed.append(f"{path}: {response.status}")
            except (aiohttp.ClientError, TimeoutError) as error:
                self.failed.append(f"{path}: {error!r}")
            self.asked += 1
            await asyncio.sleep(0.05)


@asynccontextmanager
async def probing(session: aiohttp.ClientSession, url: str) -> AsyncIterator[Probe]:
    probe = Probe()
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(probe.stream(session, url)), tasks.create_task(probe.ask(url))]
        yield probe
        for task in running:
            task.cancel()
