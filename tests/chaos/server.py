"""The server under test: its processes by role, and the resources that a fault may leak."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import aiohttp
import psutil
from stack import Stack

ROLES = ("launcher", "router", "shard", "worker", "client")
MODULES = {
    "text_generation_common.sandbox.worker": "worker",
    "text_generation_router": "router",
    "text_generation_shard": "shard",
}
NUMBERS = {"launcher": 1, "router": 1, "shard": 2, "worker": 4}
ARGUMENTS = (
    *("--num-replicas", "2", "--echo-step-ms", "10", "--echo-prefill-us", "300"),
    *("--max-batch-prefill-tokens", "512", "--audit-share", "1", "--audit-busy", "1"),
)
WAITING = "text_generation_audits_waiting"
GAUGES = (
    WAITING,
    "tgi_queue_size",
    "tgi_batch_current_size",
    "tgi_batch_total_tokens",
    "text_generation_queued_tokens",
)
SPARE_DESCRIPTORS = 8
"""Descriptors of a process beyond those of its first idle moment: connections that linger."""
READY_S = 90.0
LONGEST_AUDITS_S = 120.0
"""Seconds in which all requests of a case are computed again: one at a time, in idle time."""
LOG_LINES = 12


async def until(condition: Callable[[], bool], timeout: float) -> bool:
    """Wait until `condition` holds; return False if it does not in time."""
    end = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > end:
            return False
        await asyncio.sleep(0.02)
    return True


class Server(Stack):
    """A launcher with two echo shards, its own copy of the model's small files, and a log that can be broken."""

    def __init__(self, model: Path, hang_token: int, *, log_to_file: bool) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="chaos-"))
        self.model = self.home / "model"
        shutil.copytree(model, self.model, ignore=shutil.ignore_patterns("*.safetensors"))
        self.log_flows = threading.Event()
        self.log_flows.set()
        self.log = self.home / "log"
        self.log_to_file = log_to_file
        stderr = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND) if log_to_file else subprocess.PIPE
        environ = {"CHECKED_ECHO": json.dumps({"hang_token": hang_token})}
        super().__init__(self.model, *ARGUMENTS, environ=environ, stderr=stderr)
        if log_to_file:
            os.close(stderr)
        self.port = int(self.url.rpartition(":")[2])
        self.client: subprocess.Popen[bytes] | None = None
        self.seen: dict[int, psutil.Process] = {}
        """Every process that was seen, by id: none may outlive the launcher."""
        self.idle: dict[str, int] = {}
        """Descriptors of each process when the server was idle for the first time."""
        self.files: list[str] = []

    def _read(self) -> None:
        with self.log.open("ab", buffering=0) as log:
            for line in self.launcher.stderr or ():
                log.write(line)
                self.log_flows.wait()

    async def is_ready(self, session: aiohttp.ClientSession) -> bool:
        """Wait until the server answers; return False if the launcher ends before."""
        end = time.monotonic() + READY_S
        while self.launcher.poll() is None and time.monotonic() < end:
            self.roles()
            try:
                async with session.get(f"{self.url}/health") as response:
                    if response.status == 200:
                        return True
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.05)
        return False

    def roles(self) -> dict[str, list[psutil.Process]]:
        """Return the living processes of each role, oldest first."""
        found: dict[str, list[psutil.Process]] = {role: [] for role in ROLES}
        try:
            launcher = psutil.Process(self.launcher.pid)
            children = launcher.children(recursive=True)
        except psutil.NoSuchProcess:
            return found
        found["launcher"].append(launcher)
        for child in sorted(children, key=lambda process: process.pid):
            self.seen[child.pid] = child
            try:
                named = (role for module, role in MODULES.items() if module in child.cmdline())
                if role := next(named, None):
                    found[role].append(child)
            except (psutil.NoSuchProcess, psutil.ZombieProcess):
                continue
        if self.client is not None and self.client.poll() is None:
            found["client"].append(psutil.Process(self.client.pid))
        return found

    def is_whole(self) -> bool:
        """Return True if every process is there and none is stopped."""
        roles = self.roles()
        numbers = {role: len(roles[role]) for role in NUMBERS}
        try:
            states = [process.status() for role in NUMBERS for process in roles[role]]
        except psutil.NoSuchProcess:
            return False
        return numbers == NUMBERS and psutil.STATUS_STOPPED not in states

    def descriptors(self) -> dict[str, int]:
        """Return the number of open descriptors of each process but the workers, by role and position."""
        roles = self.roles()
        return {
            f"{role}-{n}": process.num_fds()
            for role in ("launcher", "router", "shard")
            for n, process in enumerate(roles[role])
        }

    async def busy_gauges(self, session: aiohttp.ClientSession) -> dict[str, float]:
        """Return the gauges that an idle server must have at 0 and has not, and a missing replica."""
        async with session.get(f"{self.url}/metrics") as response:
            text = await response.text()
        values = {name: float(value) for name, value in re.findall(r"^(\w+) (\S+)$", text, re.MULTILINE)}
        wrong = map(float, re.findall(r"^text_generation_audit_mismatch_total\{.*\} (\S+)$", text, re.MULTILINE))
        values["texts that audits did not confirm"] = sum(wrong)
        wanted = dict.fromkeys((*GAUGES, "texts that audits did not confirm"), 0.0) | {
            "text_generation_replicas_serving": float(NUMBERS["shard"])
        }
        return {name: values[name] for name, value in wanted.items() if values[name] != value}

    def remember(self) -> None:
        """Remember what an idle server has open."""
        if not self.idle:
            self.idle, self.files = self.descriptors(), self.left_behind()

    async def leaks(self, session: aiohttp.ClientSession) -> list[str]:
        """Return the gauges, processes, descriptors and files that are not as they were before the fault, 10 s after the last audit."""
        found: list[str] = []
        audits_end = time.monotonic() + LONGEST_AUDITS_S
        end = time.monotonic() + 10
        while (now := time.monotonic()) < end:
            if any(name.startswith(WAITING) for name in found) and now < audits_end:
                end = now + 10
            try:
                found = [f"{name} is {value:g}" for name, value in (await self.busy_gauges(session)).items()]
            except aiohttp.ClientError as error:
                found = [f"no metrics: {error}"]
            if not self.is_whole():
                found.append(f"processes: { ({role: len(each) for role, each in self.roles().items()}) }")
            for name, number in self.descriptors().items():
                if number > self.idle.get(name, number) + SPARE_DESCRIPTORS:
                    found.append(f"{name} has {number} descriptors, not {self.idle[name]}")
            found += [f"file {name}" for name in self.left_behind() if name not in self.files]
            if not found:
                return []
            await asyncio.sleep(0.1)
        return found

    async def remains(self) -> list[str]:
        """Return the processes and files that are left after the launcher's end."""
        await until(lambda: not any(_lives(process) for process in self.seen.values()), 5)
        orphans = [process for process in self.seen.values() if _lives(process)]
        return [f"orphan {process.pid}: {' '.join(process.cmdline()[-6:])}" for process in orphans] + [
            f"file {name}" for name in self.left_behind()
        ]

    def last_lines(self) -> list[str]:
        """Return the last lines of the log that are about no single request."""
        lines = self.log.read_text(errors="replace").splitlines()
        return [line for line in lines if '"request finished"' not in line][-LOG_LINES:]

    def start_client(self, phase: str) -> None:
        """Start the client process and wait for its connections."""
        script = Path(__file__).with_name("client_process.py")
        command = [sys.executable, str(script), str(self.port), phase]
        self.client = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self.client.stdout is not None
        self.client.stdout.readline()

    def stop_client(self) -> None:
        if self.client is not None:
            self.client.kill()
            self.client.communicate()
            self.client = None

    def close(self) -> None:
        self.stop_client()
        self.log_flows.set()
        super().close()
        for process in self.seen.values():
            if _lives(process):
                process.kill()
        shutil.rmtree(self.home, ignore_errors=True)


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
