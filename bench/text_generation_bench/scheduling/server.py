"""The real server for a measurement: the launcher with all it starts, on a free port of 127.0.0.1, ended by its pid."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import psutil

START_TIMEOUT_S = 180.0


@dataclass(frozen=True)
class Server:
    """A launcher that serves."""

    pid: int
    url: str

    def shards(self) -> list[psutil.Process]:
        """The shards that run now."""
        children = psutil.Process(self.pid).children()
        return [child for child in children if "text_generation_shard" in _command(child)]

    def cpu_seconds(self) -> float:
        """Processor time of the launcher and all it started, those that died excepted."""
        seconds = 0.0
        launcher = psutil.Process(self.pid)
        for process in (launcher, *launcher.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                seconds += times.user + times.system
        return seconds


@asynccontextmanager
async def serving(model: Path, *flags: str) -> AsyncIterator[Server]:
    """Start the server, wait until it serves, stop it in the end. Raises RuntimeError if it does not come up."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launcher = str(Path(sys.executable).with_name("text-generation-launcher"))
    command = [launcher, f"--model-id={model}", "--hostname=127.0.0.1", f"--port={port}", "--log-level=error", *flags]
    # Threads that spin while they wait take the processor from whoever else is on a small machine.
    environment = os.environ | {"OMP_WAIT_POLICY": "PASSIVE"}
    with tempfile.TemporaryFile() as log:  # killed shards are no news here
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stderr=log)  # noqa: ASYNC220 - nothing is measured yet
        server = Server(process.pid, f"http://127.0.0.1:{port}")
        try:
            await _until_healthy(server, process)
            yield server
        except BaseException:
            log.seek(0)
            sys.stderr.write(log.read().decode(errors="replace")[-4000:])
            raise
        finally:
            process.terminate()
            try:
                await asyncio.to_thread(process.wait, 30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class Busy:
    """What the machine's processors did between two moments: for us, and for others."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._start = self._now()

    def _now(self) -> tuple[float, float, float]:
        times = psutil.cpu_times()
        own = time.process_time()
        busy = sum(times[:3]) + sum(times[5:8])  # all but idle and waiting for disks; guests are in user
        return time.monotonic(), busy, self._server.cpu_seconds() + own

    def others(self) -> float:
        """Processors that others kept busy, in the mean."""
        at, busy, ours = (end - start for start, end in zip(self._start, self._now(), strict=True))
        return max(0.0, busy - ours) / at

    def line(self) -> str:
        """The same as a line of print."""
        return f"others used {self.others():.2f} of {os.cpu_count()} processors meanwhile"


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


async def _until_healthy(server: Server, process: subprocess.Popen[bytes]) -> None:
    async with asyncio.timeout(START_TIMEOUT_S), aiohttp.ClientSession() as session:
        while process.poll() is None:
            with suppress(aiohttp.ClientError):
                async with session.get(f"{server.url}/health") as reply:
                    if reply.status == 200:
                        return
            await asyncio.sleep(0.1)
    raise RuntimeError(f"the launcher ended with exit code {process.returncode}")
