"""The processes that the benchmark of the router starts: a shard, a router, or a scheduler process with HTTP workers."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil

from text_generation_bench.gateways import free_port


@contextmanager
def servers(model: Path, step_ms: float, *shard_options: str) -> Iterator[tuple[int, int, str]]:
    """Run a shard and a router; yield the router's pid and port and the shard's address."""
    with tempfile.TemporaryDirectory() as folder:
        address = f"unix://{folder}/shard"
        options = ("--engine=echo", f"--address={address}", f"--echo-step-ms={step_ms}", *shard_options)
        shard = start("text-generation-shard", *options)
        with router_of(shard, address, model) as (router, port):
            yield router, port, address


@contextmanager
def router_of(
    shard: subprocess.Popen[bytes], address: str, model: Path, env: Mapping[str, str] | None = None
) -> Iterator[tuple[int, int]]:
    """Run a router for `shard`, which listens on `address`; yield its pid and port. Stop both at the end."""
    port = free_port()
    router = start("text-generation-router", *_router_options(address, model, port), env=env)
    try:
        asyncio.run(_until_healthy(port))
        yield router.pid, port
    finally:
        for process in (router, shard):
            terminate_process(process.pid)
            process.wait()


def _router_options(address: str, model: Path, port: int) -> list[str]:
    return [
        f"--shard-address={address}",
        f"--model-path={model}",
        "--hostname=127.0.0.1",
        f"--port={port}",
        "--max-concurrent-requests=4096",
    ]


def start(command: str, *arguments: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
    """Start one of our commands; it logs only errors."""
    program = [str(Path(sys.executable).with_name(command)), "--log-level=error", *arguments]
    return subprocess.Popen(program, env=env)


def terminate_process(pid: int) -> None:
    """Send SIGTERM to a process and wait for its end."""
    try:
        process = psutil.Process(pid)
        process.terminate()
        process.wait(10)
    except (psutil.NoSuchProcess, ProcessLookupError):
        return


@contextmanager
def workers(model: Path, step_ms: float, count: int) -> Iterator[tuple[list[int], int]]:
    """Run a shard, a scheduler process and HTTP workers; yield the process ids of these, and the port."""
    with tempfile.TemporaryDirectory() as folder:
        address, port = f"unix://{folder}/shard", free_port()
        shard = start("text-generation-shard", "--engine=echo", f"--address={address}", f"--echo-step-ms={step_ms}")
        options = [*_router_options(address, model, port), f"--http-workers={count}", f"--worker-socket={folder}/link"]
        processes = [start("text-generation-router", *options, "--role=scheduler")]
        for number in range(count):
            flags = *options, "--role=http", f"--http-worker={number}"
            processes.append(start("text-generation-router", *flags))
        try:
            for process in processes[1:]:
                asyncio.run(_until_listening(process.pid, port))
            asyncio.run(_until_healthy(port))
            yield [process.pid for process in processes], port
        finally:
            for process in (*reversed(processes), shard):
                terminate_process(process.pid)
                process.wait()


def cpu_seconds(pid: int) -> float:
    """Return the user and system time of a process."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


async def _until_listening(pid: int, port: int) -> None:
    async with asyncio.timeout(60):
        while not any(each.laddr.port == port for each in psutil.Process(pid).net_connections()):  # noqa: ASYNC110
            await asyncio.sleep(0.1)


async def _until_healthy(port: int) -> None:
    async with asyncio.timeout(60):
        while True:
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.1)
                continue
            writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            answer = await reader.read()
            writer.close()
            if answer.startswith(b"HTTP/1.1 200"):
                return
