"""Requests whose ends are recorded, one after another in a closed loop, and the rate at which they finish."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import aiohttp

CLIENTS = 8
NEW_TOKENS = 10
BACK_OFF_S = 0.1
"""Seconds until a client whose request was refused sends the next one."""
LONGEST_S = 100.0
"""Seconds after which a stream that has not ended counts as one that never ends."""
PROMPT = "one two three four five"
PREFILL_TOKENS = 1500

_numbers = itertools.count()


def long_prompt() -> str:
    """Return a prompt of about PREFILL_TOKENS tokens that no cache holds."""
    return " ".join(random.choices(("red", "green", "blue", "black"), k=PREFILL_TOKENS))


@dataclass
class Sent:
    """One streaming request and each of its ends; a correct one has one end."""

    route: str
    body: dict[str, Any]
    new_tokens: int = 0
    """Tokens that a finished stream has; 0: any number, and any text."""
    prompt: str = ""
    """Text that a finished stream repeats; empty: any text."""
    text: str = ""
    tokens: int = 0
    ends: list[str] = field(default_factory=list)
    started: asyncio.Event = field(default_factory=asyncio.Event)

    def read(self, data: str) -> None:
        """Record one event of the stream."""
        if data == "[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            error = event["error"]
            self.ends.append(f"error {error['type'] if isinstance(error, dict) else event['error_type']}")
        elif "choices" in event:
            self.ends.extend("finished" for choice in event["choices"] if choice["finish_reason"])
        else:
            self.tokens += 1
            self.text += event["token"]["text"]
            if event["generated_text"] is not None:
                self.ends.append("finished" if self.is_complete(event["generated_text"]) else "incomplete text")
        self.started.set()

    def is_complete(self, text: str) -> bool:
        """Return True if no token was lost, repeated or changed."""
        if not self.new_tokens:
            return True
        whole = self.prompt * (len(text) // len(self.prompt) + 1) if self.prompt else text
        return self.tokens == self.new_tokens and text == self.text == whole[: len(text)]


def generation(new_tokens: int = NEW_TOKENS, prompt: str = PROMPT) -> Sent:
    body = {"inputs": prompt, "parameters": {"max_new_tokens": new_tokens}}
    return Sent("/generate_stream", body, new_tokens, PROMPT if prompt == PROMPT else "")


def chat() -> Sent:
    """Return a request that needs a worker process for its template."""
    messages = [{"role": "user", "content": PROMPT}]
    return Sent(
        "/v1/chat/completions", {"model": "tgi", "messages": messages, "max_tokens": NEW_TOKENS, "stream": True}
    )


def constrained() -> Sent:
    """Return a request that needs a worker process for its grammar: a new one each time."""
    grammar = {"type": "regex", "value": f"{next(_numbers)} [a-f]{{3}}"}
    body = {"inputs": PROMPT, "parameters": {"max_new_tokens": NEW_TOKENS, "grammar": grammar}}
    return Sent("/generate_stream", body)


MIX = (*[generation] * 6, chat, constrained)


class Traffic:
    """All requests of one case."""

    def __init__(self, session: aiohttp.ClientSession, tasks: asyncio.TaskGroup, url: str) -> None:
        self._session = session
        self._tasks = tasks
        self._running: list[asyncio.Task[None]] = []
        self._loop: list[asyncio.Task[None]] = []
        self._going = asyncio.Event()
        self.url = url
        self.sent: list[Sent] = []
        self.finished = 0

    def open(self, sent: Sent) -> Sent:
        """Start a stream beside the closed loop."""
        self._running.append(self._tasks.create_task(self._stream(sent)))
        return sent

    def start_loop(self) -> None:
        """Let CLIENTS clients send requests one after another."""
        self._going.set()
        self._loop = [self._tasks.create_task(self._repeat(number)) for number in range(CLIENTS)]

    async def stop_loop(self) -> None:
        """Return when the clients of the loop have their last response."""
        self._going.clear()
        if self._loop:
            await asyncio.wait(self._loop)

    async def all_ended(self) -> None:
        """Return when every stream has ended."""
        await self.stop_loop()
        if self._running:
            await asyncio.wait(self._running)

    async def rate(self, seconds: float) -> float:
        """Measure the requests that finish in a second."""
        before = self.finished
        await asyncio.sleep(seconds)
        return (self.finished - before) / seconds

    def ends(self) -> Counter[str]:
        """Count the ends of all streams; a stream that did not end exactly once has an end of its own kind."""
        return Counter(
            sent.ends[0] if len(sent.ends) == 1 else f"ended {len(sent.ends)} times: {'; '.join(sent.ends)}"
            for sent in self.sent
        )

    async def _repeat(self, number: int) -> None:
        for kind in itertools.islice(itertools.cycle(MIX), number, None):
            if not self._going.is_set():
                return
            sent = kind()
            await self._stream(sent)
            if sent.ends == ["finished"]:
                self.finished += 1
            else:
                await asyncio.sleep(BACK_OFF_S)

    async def _stream(self, sent: Sent) -> None:
        self.sent.append(sent)
        try:
            async with self._session.post(self.url + sent.route, json=sent.body) as response:
                if response.status != 200:
                    sent.ends.append(f"refused {response.status}")
                async for line in response.content:
                    if line.startswith(b"data:"):
                        sent.read(line.removeprefix(b"data:").decode().strip())
            if not sent.ends:
                sent.ends.append("closed")
        except aiohttp.ClientConnectorError:
            sent.ends.append("unreachable")
        except aiohttp.ClientError:
            if not sent.ends:
                sent.ends.append("closed")
        except TimeoutError:
            sent.ends.append("silent")
        finally:
            sent.started.set()
