"""A router of several processes for tests: shards, the scheduler process, and HTTP workers with a port each.

A test so knows which worker it asks.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
import time
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
from ports import free_port
from shard_process import shard

from text_generation_common.shard_access import ShardAccess

READY_S = 60.0
GAUGES = (
    *("tgi_queue_size", "tgi_batch_current_size", "tgi_batch_total_tokens"),
    *("text_generation_queued_tokens", "text_generation_preparation_characters"),
)


async def until(holds: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    async with asyncio.timeout(READY_S):
        while not holds():  # noqa: ASYNC110 - for conditions of every kind
            await asyncio.sleep(0.01)


async def load_s() -> float:
    """Return how long a process of the router takes now to load its code: longer on a busy machine."""
    began = time.monotonic()
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "import text_generation_router.serve.worker")
    assert await process.wait() == 0
    return time.monotonic() - began


class ProcessRouter:
    """The scheduler process and the HTTP workers of a router."""

    def __init__(self, model: Path, shard_address: str, folder: Path, access: ShardAccess, *flags: str) -> None:
        """`shard_address`: those of all replicas, with commas between."""
        self._folder = folder
        self.socket = folder / "link"
        self._started = 0
        self._flags = (
            f"--model-path={model}",
            f"--shard-address={shard_address}",
            f"--worker-socket={self.socket}",
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
        await self.start_scheduler()
        for number, port in enumerate(self.ports):
            self.clients.append(aiohttp.ClientSession(f"http://127.0.0.1:{port}"))
            self.workers.append(await self._worker(number))
        for number in range(workers):
            await self.ready(number)

    async def start_scheduler(self) -> None:
        """Start a scheduler process, as the launcher does when there is none."""
        self.scheduler = await self._start("scheduler", f"--http-workers={len(self.ports)}")

    async def kill_scheduler(self, hang_s: float = 0.0) -> None:
        """Kill the scheduler process, after it hung for a time."""
        if hang_s:
            self.scheduler.send_signal(signal.SIGSTOP)
            await asyncio.sleep(hang_s)
        self.scheduler.kill()
        await self.scheduler.wait()

    async def replace_scheduler(self, hang_s: float = 0.0) -> None:
        """Kill the scheduler process, and start another one."""
        await self.kill_scheduler(hang_s)
        await self.start_scheduler()

    async def idle(self) -> None:
        """Wait until the metrics show no request, slot or token in use."""
        async with asyncio.timeout(READY_S):
            while await self._in_use():  # noqa: ASYNC110 - another process knows it
                await asyncio.sleep(0.1)

    async def _in_use(self) -> dict[str, float]:
        async with self.clients[0].get("/metrics") as response:
            lines = (line.rsplit(" ", 1) for line in (await response.text()).splitlines() if line.startswith(GAUGES))
        values = {name: float(value) for name, value in lines}
        assert values, "the metrics have no gauges"
        return {name: value for name, value in values.items() if value}

    def log(self, worker: int | None = None) -> str:
        """Return the log records of all processes so far, or those of a worker."""
        text = "".join(path.read_text() for path in sorted(self._folder.glob("*.log")))
        return "\n".join(line for line in text.splitlines() if worker is None or f"http-worker-{worker}" in line)

    async def restart(self, worker: int) -> None:
        """Start a worker again at its port, and wait until it serves."""
        self.workers[worker] = await self._worker(worker)
        await self.ready(worker)

    async def restart_scheduler(self) -> None:
        """Kill the scheduler process, start another one, and wait until the workers have found it."""
        await self.kill_scheduler()
        for client in self.clients:
            async with client.get("/health", headers={"connection": "close"}) as response:
                assert response.status == 503
        await self.start_scheduler()
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

    async def _worker(self, number: int) -> Process:
        flags = f"--http-worker={number}", f"--http-workers={len(self.ports)}", f"--port={self.ports[number]}"
        return await self._start("http", *flags)

    async def _start(self, role: str, *flags: str) -> Process:
        program = Path(sys.executable).with_name("text-generation-router")
        self._started += 1
        with (self._folder / f"{self._started:03}-{role}.log").open("wb") as log:
            return await asyncio.create_subprocess_exec(
                program,
                f"--role={role}",
                *self._flags,
                *flags,
                env=self._environ,
                stderr=log,
            )


@asynccontextmanager
async def router(
    model: Path,
    workers: int,
    *flags: str,
    step_ms: float = 2,
    replicas: int = 1,
    engine: str = "echo",
    shard_flags: Sequence[str] = (),
) -> AsyncIterator[ProcessRouter]:
    """A router with `workers` HTTP workers and these flags; stopped with the block."""
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        addresses, access = [f"unix://{folder}/shard-{number}" for number in range(replicas)], ShardAccess.of()
        of_engine = f"--echo-step-ms={step_ms}", f"--engine={engine}", f"--model-path={model}", *shard_flags
        for address in addresses:
            await stack.enter_async_context(shard(address, *of_engine, access=access))
        started = ProcessRouter(model, ",".join(addresses), Path(folder), access, *flags)
        try:
            await started.start(workers)
            yield started
        finally:
            await started.stop()
