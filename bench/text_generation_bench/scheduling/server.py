"""A real server for a measurement: the launcher and its children, on a free port of 127.0.0.1."""

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
class BenchServer:
    """A running launcher."""

    pid: int
    url: str

    def shards(self) -> list[psutil.Process]:
        """Return the running shards."""
        children = psutil.Process(self.pid).children()
        return [child for child in children if "text_generation_shard" in _command(child)]

    def cpu_seconds(self) -> float:
        """Return the processor time of the launcher and its running descendants."""
        seconds = 0.0
        launcher = psutil.Process(self.pid)
        for process in (launcher, *launcher.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                seconds += times.user + times.system
        return seconds


@asynccontextmanager
async def serving(model: Path, *flags: str) -> AsyncIterator[BenchServer]:
    """Start a server, wait until it serves, stop it at the end. Raises RuntimeError if it does not start."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launcher = str(Path(sys.executable).with_name("text-generation-launcher"))
    command = [launcher, f"--model-id={model}", "--hostname=127.0.0.1", f"--port={port}", "--log-level=error", *flags]
    # Spinning threads would take the processor from other processes on a small machine.
    environment = os.environ | {"OMP_WAIT_POLICY": "PASSIVE"}
    with tempfile.TemporaryFile() as log:  # the log is shown only after an error
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stderr=log)  # noqa: ASYNC220 - nothing is measured yet
        server = BenchServer(process.pid, f"http://127.0.0.1:{port}")
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


class CpuUsage:
    """The use of the processors by other programs since its creation."""

    def __init__(self, server: BenchServer) -> None:
        self._server = server
        self._start = self._now()

    def _now(self) -> tuple[float, float, float]:
        times = psutil.cpu_times()
        own = time.process_time()
        busy = sum(times[:3]) + sum(times[5:8])  # all but idle and iowait; guest time is part of user
        return time.monotonic(), busy, self._server.cpu_seconds() + own

    def others(self) -> float:
        """Return the mean number of processors used by other programs."""
        at, busy, ours = (end - start for start, end in zip(self._start, self._now(), strict=True))
        return max(0.0, busy - ours) / at

    def line(self) -> str:
        """Return the same as text."""
        return f"other programs used {self.others():.2f} of {os.cpu_count()} processors"


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


async def _until_healthy(server: BenchServer, process: subprocess.Popen[bytes]) -> None:
    async with asyncio.timeout(START_TIMEOUT_S), aiohttp.ClientSession() as session:
        while process.poll() is None:
            with suppress(aiohttp.ClientError):
                async with session.get(f"{server.url}/health") as reply:
                    if reply.status == 200:
                        return
            await asyncio.sleep(0.1)
    raise RuntimeError(f"the launcher ended with exit code {process.returncode}")
