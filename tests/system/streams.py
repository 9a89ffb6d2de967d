"""Clients of /generate_stream that record the end of their stream."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Literal

import aiohttp

End = Literal["finished", "error", "closed", "refused"]


@dataclass
class Stream:
    """One request and its result."""

    inputs: str = "one two three four five"
    text: str = ""
    tokens: int = 0
    end: End | None = None
    ended_at: float = 0.0


class Streams:
    """Streams that run at the same time."""

    def __init__(self, session: aiohttp.ClientSession, tasks: asyncio.TaskGroup) -> None:
        self._session = session
        self._tasks = tasks
        self.streams: list[Stream] = []
        self._running: list[asyncio.Task[None]] = []

    async def open(self, url: str, count: int, max_new_tokens: int, inputs: str = Stream.inputs) -> None:
        """Start `count` streams and wait for the first token of each."""
        started = asyncio.Semaphore(0)
        for _ in range(count):
            self.streams.append(stream := Stream(inputs))
            self._running.append(self._tasks.create_task(self._read(stream, url, max_new_tokens, started)))
        for _ in range(count):
            await started.acquire()

    async def all_ended(self) -> None:
        """Wait until each stream has ended."""
        await asyncio.wait(self._running)

    async def _read(self, stream: Stream, url: str, max_new_tokens: int, started: asyncio.Semaphore) -> None:
        body = {"inputs": stream.inputs, "parameters": {"max_new_tokens": max_new_tokens}}
        try:
            async with self._session.post(f"{url}/generate_stream", json=body) as response:
                if response.status != 200:
                    stream.end = "refused"
                    return
                async for line in response.content:
                    self._record(stream, line, started)
            stream.end = stream.end or "closed"
        except aiohttp.ClientError:
            stream.end = stream.end or "closed"
        finally:
            stream.ended_at = asyncio.get_running_loop().time()
            if not stream.tokens:
                started.release()

    @staticmethod
    def _record(stream: Stream, line: bytes, started: asyncio.Semaphore) -> None:
        if not line.startswith(b"data:"):
            return
        event = json.loads(line.removeprefix(b"data:"))
        if "error" in event:
            stream.end = "error"
            return
        stream.tokens += 1
        if stream.tokens == 1:
            started.release()
        if event["generated_text"] is not None:
            stream.end, stream.text = "finished", event["generated_text"]
