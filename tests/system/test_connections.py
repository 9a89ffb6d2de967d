"""Attacks on connections, and rolling restarts: the real processes with the echo engine."""

from __future__ import annotations

import asyncio
import itertools
import json
import resource
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, closing, suppress
from pathlib import Path

import aiohttp
import psutil
import pytest
from ports import free_port
from router_workers import until
from stack import Stack, running, still_running
from streams import Streams

pytestmark = pytest.mark.system

HEADERS = b"POST /generate_stream HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
PERMITS = 8


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def port_of(stack: Stack) -> int:
    return int(stack.url.rpartition(":")[2])


def stream_request(tokens: int) -> bytes:
    body = json.dumps({"inputs": "one two three", "parameters": {"max_new_tokens": tokens}}).encode()
    return HEADERS + b"content-length: %d\r\n\r\n" % len(body) + body


@asynccontextmanager
async def attackers(stack: Stack, sent: bytes, count: int, window: int = 0) -> AsyncIterator[list[socket.socket]]:
    """Open connections that send this and nothing more; `window`: bytes that their system takes ahead of them."""
    opened: list[socket.socket] = []

    def attack() -> None:  # on a thread: the event loop measures
        for _ in range(count):
            opened.append(connection := socket.socket())
            if window:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
            connection.connect(("127.0.0.1", port_of(stack)))
            connection.sendall(sent)
            connection.setblocking(False)

    try:
        await asyncio.to_thread(attack)
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
        await until(lambda: bool(probe.gaps))
        yield probe
        for task in running:
            task.cancel()


# --------------------------------------------------------------------------------------------------------------- attacks


@pytest.mark.full
@pytest.mark.usefixtures("many_descriptors")
async def test_probes_and_streams_go_on_when_descriptors_run_out(
    echo_model: Path, session: aiohttp.ClientSession
) -> None:
    with running(echo_model, "--echo-step-ms", "10") as stack:
        process = stack.router()["router"]
        most = process.num_fds() + 100
        process.rlimit(psutil.RLIMIT_NOFILE, (most, most))
        async with probing(session, stack.url) as probe, attackers(stack, HEADERS, 500):
            await until(lambda: probe.asked > 30)
            assert process.num_fds() < most
        assert probe.failed == []
        assert max(probe.gaps) < 1.0  # a busy machine


@pytest.mark.full
@pytest.mark.usefixtures("many_descriptors")
async def test_unfinished_requests_idle_connections_and_slow_readers_are_gone_in_time(
    echo_model: Path, session: aiohttp.ClientSession
) -> None:
    half_body = HEADERS + b'content-length: 2000000\r\n\r\n{"inputs": "' + b"x" * 100_000
    with running(echo_model, "--echo-step-ms", "10", "--max-concurrent-requests", str(PERMITS + 1)) as stack:
        process, loop = stack.router()["router"], asyncio.get_running_loop()
        async with probing(session, stack.url) as probe, asyncio.timeout(90):
            before = process.memory_info().rss
            async with (
                attackers(stack, stream_request(1500), PERMITS, window=4096) as slow,
                attackers(stack, HEADERS, 1000) as headers,
                attackers(stack, half_body, 300) as bodies,
                attackers(stack, b"", 1000) as silent,
            ):
                start = loop.time()
                await until(lambda: not left(headers) + left(bodies) + left(silent))
                assert loop.time() - start < 15
                while True:  # the permits of the slow readers
                    body = {"inputs": "a", "parameters": {"max_new_tokens": 1}}
                    async with session.post(f"{stack.url}/generate", json=body) as response:
                        if response.status == 200:
                            break
                    for reader in slow:
                        with suppress(BlockingIOError, ConnectionError):
                            reader.recv(400)
                    await asyncio.sleep(1)
                assert loop.time() - start < 30
        await until(lambda: process.memory_info().rss < before + 50_000_000)
        assert probe.failed == []
        assert max(probe.gaps) < 1.0  # a busy machine


# -------------------------------------------------------------------------------------------------------------- draining


async def test_a_draining_server_refuses_politely_and_closes_last(
    echo_model: Path, session: aiohttp.ClientSession
) -> None:
    port = free_port()
    with running(echo_model, "--echo-step-ms", "20", "--management-port", str(port)) as stack:
        assert stack.events("launcher")[-1] == "ready"
        assert stack.records[-1]["url"] == stack.url
        children = stack.children()
        management = f"http://127.0.0.1:{port}"

        async def status_of(url: str) -> int:
            async with session.get(url) as response:
                return response.status

        assert [await status_of(management + path) for path in ("/health/ready", "/metrics", "/info")] == [
            200,
            200,
            404,
        ]
        async with asyncio.TaskGroup() as tasks:
            streams = Streams(session, tasks)
            await streams.open(stack.url, 4, max_new_tokens=150)
            stack.launcher.send_signal(signal.SIGTERM)
            await asyncio.to_thread(stack.wait_for, "draining", "router")
            live = [f"{base}{path}" for base in (stack.url, management) for path in ("/health/live", "/v2/health/live")]
            ready = [f"{base}{path}" for base in (stack.url, management) for path in ("/health", "/v2/health/ready")]
            assert [await status_of(url) for url in live + ready] == [200] * 4 + [503] * 4
            for path in ("/generate", "/v1/chat/completions", "/tokenize"):
                async with session.post(stack.url + path, json={"inputs": "a"}) as response:
                    assert (response.status, response.headers["retry-after"]) == (503, "1")
                    assert response.headers["connection"] == "close"
            await streams.all_ended()
        assert {(stream.end, stream.tokens) for stream in streams.streams} == {("finished", 150)}
        assert await asyncio.to_thread(stack.wait) == 0
        assert await asyncio.to_thread(still_running, children, 5) == []
        assert stack.left_behind() == []


async def test_a_server_that_leaves_is_unready_and_serves_until_load_balancers_have_noticed(
    echo_model: Path, session: aiohttp.ClientSession
) -> None:
    body = {"inputs": "a b", "parameters": {"max_new_tokens": 3}}
    flags = ("--echo-step-ms", "5", "--shutdown-delay", "2", "--drain-timeout", "1", "-g", "1")
    long = {"inputs": "a b", "parameters": {"max_new_tokens": 900}}
    with running(echo_model, *flags) as stack:
        loop = asyncio.get_running_loop()
        # The router drains until this stream ends: in that time it refuses others by name.
        stream = await session.post(f"{stack.url}/generate_stream", json=long)
        stack.launcher.send_signal(signal.SIGTERM)
        left = loop.time()
        await asyncio.to_thread(stack.wait_for, "not ready, still accepting", "router")
        answers = []
        while not answers or answers[-1][1] == 200:
            async with session.get(f"{stack.url}/health/ready") as ready:
                pass
            async with session.post(f"{stack.url}/generate", json=body) as response:
                answers.append((ready.status, response.status, response.headers["connection"]))
        assert loop.time() - left > 2
        assert len(answers) > 10
        assert set(answers[:-1]) == {(503, 200, "close")}
        assert answers[-1] == (503, 503, "close")
        stream.close()
        assert await asyncio.to_thread(stack.wait) == 0


class Proxy:
    """A TCP proxy that takes its servers in turn, and another one only if a connection is refused."""

    def __init__(self, ports: list[int]) -> None:
        self.ports = ports
        self._turn = itertools.count()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first = next(self._turn) % len(self.ports)
        for port in (*self.ports[first:], *self.ports[:first]):
            with suppress(ConnectionRefusedError):
                upstream = await asyncio.open_connection("127.0.0.1", port)
                break
        else:
            writer.close()
            return

        async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
            with suppress(ConnectionError):
                while data := await source.read(1 << 16):
                    target.write(data)
                    await target.drain()
            target.close()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(copy(reader, upstream[1]))
            tasks.create_task(copy(upstream[0], writer))


@pytest.mark.full
async def test_no_request_is_lost_when_servers_restart_in_turn(echo_model: Path) -> None:
    """Clients ask again after a 503, as OpenAI's do, and after nothing else."""
    requests, restarts = 10_000, 2
    body = {"inputs": "one two three", "parameters": {"max_new_tokens": 5}}
    numbers = iter(range(requests))
    done = refused = 0
    lost: list[str] = []

    async def client(url: str) -> None:
        nonlocal done, refused
        async with aiohttp.ClientSession() as session:
            for _ in numbers:
                for _ in range(10):
                    try:
                        async with session.post(f"{url}/generate", json=body) as response:
                            await response.read()
                            if response.status == 503:
                                refused += 1
                                await asyncio.sleep(float(response.headers["retry-after"]) / 10)
                                continue
                            if response.status != 200:
                                lost.append(str(response.status))
                    except aiohttp.ClientError as error:
                        lost.append(repr(error))
                    break
                else:
                    lost.append("refused ten times")
                done += 1

    with ExitStack() as stacks:
        servers = [stacks.enter_context(running(echo_model, "--echo-step-ms", "5")) for _ in range(2)]
        proxy = Proxy([port_of(server) for server in servers])
        async with await asyncio.start_server(proxy.serve, "127.0.0.1") as listening, asyncio.TaskGroup() as tasks:
            url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
            for _ in range(PERMITS):
                tasks.create_task(client(url))
            for number in range(restarts):
                began = done
                await until(lambda began=began: done >= min(began + requests // 8, requests))
                servers[number].launcher.send_signal(signal.SIGTERM)
                assert await asyncio.to_thread(servers[number].wait) == 0
                if number + 1 < restarts:
                    servers[number] = stacks.enter_context(closing(await asyncio.to_thread(started, echo_model)))
                    proxy.ports[number] = port_of(servers[number])
    assert (done, lost) == (requests, [])
    assert refused


def started(model: Path) -> Stack:
    """Start a server and wait until it is ready."""
    stack = Stack(model, "--echo-step-ms", "5")
    stack.wait_for("ready")
    return stack
