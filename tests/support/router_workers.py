"""A router of several processes for tests: an echo shard, the scheduler process, and HTTP workers with a port each.

A test so knows which worker it asks.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import tempfile
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
from shard_process import shard

from text_generation_proto.access import ShardAccess

READY_S = 60.0


def free_port() -> int:
    """Return a port that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port: int = found.getsockname()[1]
        return port


class ProcessRouter:
    """The scheduler process and the HTTP workers of a router."""

    def __init__(self, model: Path, shard_address: str, folder: Path, access: ShardAccess, *flags: str) -> None:
        self._flags = (
            f"--model-path={model}",
            f"--shard-address={shard_address}",
            f"--front-socket={folder / 'front'}",
            "--hostname=127.0.0.1",
            *flags,
        )
        self._environ = os.environ | access.environ
        self.scheduler: Process
        self.workers: list[Process] = []
        self.clients: list[aiohttp.ClientSession] = []
        """A client of each worker."""
        self.ports: list[int] = []
        self.model = model

    async def start(self, workers: int) -> None:
        """Start all processes, and wait until the workers serve."""
        self.ports = [free_port() for _ in range(workers)]
        self.scheduler = await self._scheduler()
        for number, port in enumerate(self.ports):
            self.clients.append(aiohttp.ClientSession(f"http://127.0.0.1:{port}"))
            self.workers.append(await self._worker(number))
        for number in range(workers):
            await self.ready(number)

    async def restart(self, worker: int) -> None:
        """Start a worker again at its port, and wait until it serves."""
        self.workers[worker] = await self._worker(worker)
        await self.ready(worker)

    async def restart_scheduler(self) -> None:
        """Kill the scheduler process, start another one, and wait until the workers have found it."""
        self.scheduler.kill()
        await self.scheduler.wait()
        for client in self.clients:
            async with client.get("/health", headers={"connection": "close"}) as response:
                assert response.status == 503
        self.scheduler = await self._scheduler()
        await self.ready(len(self.workers) - 1)

    async def ready(self, worker: int) -> None:
        """Wait until a worker is ready."""
        async with asyncio.timeout(READY_S):
            while True:
                try:
                    async with self.clients[worker].get("/health", headers={"connection": "close"}) as response:
                        if response.status == 200:
                            return
                except aiohttp.ClientConnectionError:
                    assert self.workers[worker].returncode is None, "the worker ended"
                await asyncio.sleep(0.02)

    async def stop(self) -> None:
        """Stop all processes."""
        for client in self.clients:
            await client.close()
        for process in (*self.workers, self.scheduler):
            if process.returncode is None:
                process.terminate()
            await process.wait()

    async def _scheduler(self) -> Process:
        return await self._start("scheduler", f"--http-workers={len(self.ports)}")

    async def _worker(self, number: int) -> Process:
        flags = f"--http-worker={number}", f"--http-workers={len(self.ports)}", f"--port={self.ports[number]}"
        return await self._start("http", *flags)

    async def _start(self, role: str, *flags: str) -> Process:
        program = Path(sys.executable).with_name("text-generation-router")
        return await asyncio.create_subprocess_exec(
            program, f"--role={role}", *self._flags, *flags, env=self._environ, stderr=asyncio.subprocess.DEVNULL
        )


@asynccontextmanager
async def router(model: Path, workers: int, *flags: str, step_ms: float = 2) -> AsyncIterator[ProcessRouter]:
    """A router with `workers` HTTP workers and these flags; stopped with the block."""
    with tempfile.TemporaryDirectory() as folder:
        address, access = f"unix://{folder}/shard", ShardAccess.of()
        async with shard(address, f"--echo-step-ms={step_ms}", access=access):
            started = ProcessRouter(model, address, Path(folder), access, *flags)
            try:
                await started.start(workers)
                yield started
            finally:
                await started.stop()
