"""Shards and routers as processes of their own, and clients of them, for the commands in this folder.

Imports only packages that the server needs: the commands run with any interpreter that can run the server.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from byte_tokenizer import write_tokenizer
from certificates import tls_arguments, write_certificates  # noqa: F401 - for the commands
from ports import free_port

START_S = 60.0


class Process:
    """A started process and its log."""

    def __init__(self, module: str, process: asyncio.subprocess.Process) -> None:
        self.records: list[dict[str, Any]] = []
        self._module = module
        self._process = process

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    async def _read(self) -> AsyncIterator[dict[str, Any]]:
        """Yield the records of the log from where it was read to."""
        assert self._process.stderr is not None
        async for line in self._process.stderr:
            self.records.append(json.loads(line) if line.startswith(b"{") else {"event": line.decode().strip()})
            yield self.records[-1]

    async def event(self, name: str, timeout_s: float = START_S) -> dict[str, Any]:
        """Read the log until this event; return the record."""
        async with asyncio.timeout(timeout_s):
            async for record in self._read():
                if record["event"] == name:
                    return record
        raise AssertionError(f"{self._module} ended without {name!r}: {self.records[-5:]}")

    def signal(self, number: int) -> None:
        """Send a signal."""
        self._process.send_signal(number)

    async def ended(self) -> int:
        """Read the log to its end; return the exit code."""
        async for _ in self._read():
            pass
        return await self._process.wait()


@asynccontextmanager
async def started(
    module: str, *flags: str, environ: Mapping[str, str] | None = None, within: tuple[str, ...] = ()
) -> AsyncIterator[Process]:
    """Start a module of the server, by the command `within`; kill it with the block if it still runs."""
    process = await asyncio.create_subprocess_exec(
        *(*within, sys.executable, "-P", "-m", module, "--json-output", *flags),
        env={**os.environ, **(environ or {})},
        stdin=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        limit=1 << 20,
    )
    try:
        yield Process(module, process)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@dataclass
class Split:
    """A router and its shards, as processes beside each other."""

    folder: Path
    addresses: list[str]
    shard_flags: tuple[str, ...]
    shards: list[Process]
    router: Process
    url: str
    stack: AsyncExitStack
    environ: Mapping[str, str] | None

    async def restart(self, number: int) -> float:
        """Send SIGTERM to a shard, start it again when it has ended, and wait for the router; return the seconds."""
        began = time.monotonic()
        self.shards[number].signal(signal.SIGTERM)
        assert await self.shards[number].ended() == 0
        self.shards[number] = await self.stack.enter_async_context(
            shard(self.addresses[number], self.shard_flags, self.environ)
        )
        await self.router.event("shard joined again")
        return time.monotonic() - began


def shard(
    address: str, flags: tuple[str, ...] = (), environ: Mapping[str, str] | None = None
) -> AbstractAsyncContextManager[Process]:
    """Start a shard with the echo engine."""
    return started("text_generation_shard", "--engine=echo", f"--address={address}", *flags, environ=environ)


@asynccontextmanager
async def split(
    shards: int,
    *,
    shard_flags: tuple[str, ...] = (),
    router_flags: tuple[str, ...] = (),
    tcp: bool = False,
    environ: Mapping[str, str] | None = None,
) -> AsyncIterator[Split]:
    """Run a router with shards; yield once it serves."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="t-")))
        write_tokenizer(folder)
        addresses = [f"127.0.0.1:{free_port()}" if tcp else f"unix://{folder}/s{number}" for number in range(shards)]
        running = [await stack.enter_async_context(shard(address, shard_flags, environ)) for address in addresses]
        router = await stack.enter_async_context(
            started(
                "text_generation_router",
                *("--hostname=127.0.0.1", "--port=0", f"--model-path={folder}", "--disable-grammar-support"),
                *(f"--shard-address={','.join(addresses)}", *router_flags),
                environ=environ,
            )
        )
        url = (await router.event("ready"))["url"]
        yield Split(folder, addresses, shard_flags, running, router, url, stack, environ)


@dataclass
class Answer:
    """A streamed answer."""

    prompt: str
    status: int = 0
    text: str | None = None
    error: str = ""
    times: list[float] = field(default_factory=list)
    """Arrival of each token, by a monotonic clock."""

    @property
    def gaps(self) -> list[float]:
        """Seconds between two tokens."""
        return [after - before for before, after in pairwise(self.times)]

    def is_right(self, new_tokens: int) -> bool:
        """Return True if it is what the echo engine answers."""
        return self.text == (self.prompt * (new_tokens // len(self.prompt) + 1))[:new_tokens]


async def stream(session: aiohttp.ClientSession, url: str, prompt: str, new_tokens: int) -> Answer:
    """Read a stream to its end."""
    answer = Answer(prompt)
    body = {"inputs": prompt, "parameters": {"max_new_tokens": new_tokens}}
    try:
        async with session.post(f"{url}/generate_stream", json=body) as response:
            answer.status = response.status
            async for line in response.content:
                if not line.startswith(b"data:"):
                    continue
                event = json.loads(line.removeprefix(b"data:"))
                if "error" in event:
                    answer.error = event["error"]
                    break
                answer.times.append(time.monotonic())
                answer.text = event["generated_text"] or answer.text
    except (aiohttp.ClientError, TimeoutError) as error:
        answer.error = repr(error)
    return answer


@asynccontextmanager
async def streaming_clients(
    session: aiohttp.ClientSession, url: str, clients: int, new_tokens: int
) -> AsyncIterator[list[Answer]]:
    """Let clients read one stream after the other while the block runs; yield their answers, complete after the block."""
    answers: list[Answer] = []
    over = asyncio.Event()

    async def client(number: int) -> None:
        while not over.is_set():
            answers.append(await stream(session, url, f"client {number} says ", new_tokens))

    async with asyncio.TaskGroup() as tasks:
        for number in range(clients):
            tasks.create_task(client(number))
        yield answers
        over.set()


async def until_open(session: aiohttp.ClientSession, url: str, path: str = "/health") -> None:
    """Wait until the server answers 200."""
    async with asyncio.timeout(START_S):
        while True:
            try:
                async with session.get(f"{url}{path}") as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.05)
