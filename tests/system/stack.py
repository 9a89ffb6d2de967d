"""The whole server as processes: text-generation-launcher and its children."""

from __future__ import annotations

import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from ports import free_port

START_TIMEOUT = 120.0
ENGINES = Path(__file__).parents[1] / "support" / "engines"
"""Its entry point puts an engine that checks its orders in the place of the echo engine."""


class Stack:
    """A started launcher: its log, processes and sockets."""

    def __init__(
        self,
        model: Path,
        *args: str,
        engine: str = "echo",
        environ: Mapping[str, str] | None = None,
        stderr: int = subprocess.PIPE,
        within: Sequence[str] = (),
        python: Path = Path(sys.executable),
    ) -> None:
        """`stderr` is a descriptor for the log if the stack is not to read it itself; `within` a command that runs others.

        `python` is that of the environment with the launcher.
        """
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.folder = Path(tempfile.mkdtemp(prefix="t-"))  # a short path, because it contains sockets
        self.records: list[dict[str, Any]] = []
        self._arrivals: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self.launcher = subprocess.Popen(
            [
                *within,
                python.with_name("text-generation-launcher"),
                *("--model-id", str(model), "--engine", engine, "--json-output"),
                *("--hostname", "127.0.0.1", "--port", str(port), *args),
            ],
            env=os.environ | {"TMPDIR": str(self.folder), "PYTHONPATH": str(ENGINES)} | dict(environ or {}),
            stdin=subprocess.DEVNULL,
            stderr=stderr,
        )
        self._reading = threading.Thread(target=self._read)
        self._reading.start()

    def _read(self) -> None:
        for line in self.launcher.stderr or ():
            self._arrivals.put(json.loads(line))  # every line is a JSON record, also those of children
        self._arrivals.put(None)

    def wait_for(self, event: str, process: str = "launcher") -> dict[str, Any]:
        """Read the log until a process logs this event; return the record."""
        while record := self._arrivals.get(timeout=START_TIMEOUT):
            self.records.append(record)
            if record["process"] == process and record["event"] == event:
                return record
        raise AssertionError(self.records)

    def wait(self, timeout: float = START_TIMEOUT) -> int:
        """Read the log to its end and return the launcher's exit code."""
        while record := self._arrivals.get(timeout=timeout):
            self.records.append(record)
        return self.launcher.wait(timeout)

    def children(self) -> list[psutil.Process]:
        """Return all descendants of the launcher."""
        return psutil.Process(self.launcher.pid).children(recursive=True)

    def kill(self, name: str, replica: int = 0) -> None:
        """Send SIGKILL to the launcher, the router or the shard of a replica."""
        if name == "launcher":
            self.launcher.kill()
        elif name == "shard":
            self.shard(replica).kill()
        else:
            (process,) = (child for child in self.children() if f"text_generation_{name}" in child.cmdline())
            process.kill()

    def shard(self, replica: int) -> psutil.Process:
        """Return the shard that listens on this replica's private socket."""
        (process,) = (
            child
            for child in self.children()
            if "text_generation_shard" in child.cmdline() and f"/shard-{replica}" in " ".join(child.cmdline())
        )
        return process

    def router(self) -> dict[str, psutil.Process]:
        """Return the processes of the router by their names in the log."""
        found = {}
        for child in psutil.Process(self.launcher.pid).children():
            line = child.cmdline()
            if "text_generation_router" in line:
                number = line[line.index("--http-worker") + 1] if "--http-worker" in line else "0"
                role = line[line.index("--role") + 1] if "--role" in line else "all"
                name = {"all": "router", "scheduler": "router-scheduler"}.get(role, f"http-worker-{number}")
                found[name] = child
        return found

    def output(self, process: str) -> str:
        """Return what a process wrote beside its log records."""
        return "\n".join(
            record.get("text", "")
            for record in self.records
            if record["process"] == process and record["event"] == "output"
        )

    def events(self, process: str) -> list[str]:
        """Return the events that a process logged."""
        return [record["event"] for record in self.records if record["process"] == process]

    def left_behind(self) -> list[str]:
        """Return the files in the folder for temporary files, except the cache that torch makes there for each user."""
        found = (str(path.relative_to(self.folder)) for path in self.folder.rglob("*"))
        return sorted(name for name in found if not name.startswith("torchinductor_"))

    def close(self) -> None:
        """Stop all processes that still run."""
        if self.launcher.poll() is None:
            children = self.children()
            self.launcher.send_signal(signal.SIGTERM)
            self.launcher.send_signal(signal.SIGTERM)
            _, alive = psutil.wait_procs(children, timeout=10)
            for process in alive:
                process.kill()
            self.launcher.wait(10)
        self._reading.join(10)
        if self.launcher.stderr is not None:
            self.launcher.stderr.close()
        shutil.rmtree(self.folder, ignore_errors=True)


@contextmanager
def running(
    model: Path,
    *args: str,
    engine: str = "echo",
    environ: Mapping[str, str] | None = None,
    within: Sequence[str] = (),
    grammars: bool = False,
) -> Iterator[Stack]:
    """Run a stack and yield it once it is ready. With the echo engine it serves no grammars by default."""
    without = () if grammars or engine != "echo" else ("--disable-grammar-support",)
    stack = Stack(model, *without, *args, engine=engine, environ=environ, within=within)
    try:
        stack.wait_for("ready")
        yield stack
    finally:
        stack.close()


def still_running(processes: list[psutil.Process], timeout: float) -> list[psutil.Process]:
    """Wait for processes to end; return the others. A zombie has ended: its new parent has not waited for it yet."""
    _, alive = psutil.wait_procs(processes, timeout)
    return [process for process in alive if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


async def generate(session: aiohttp.ClientSession, url: str) -> str:
    """Return the answer to a short request."""
    body = {"inputs": "one two three", "parameters": {"max_new_tokens": 3}}
    async with session.post(f"{url}/generate", json=body) as response:
        assert response.status == 200, await response.text()
        return str((await response.json())["generated_text"])
