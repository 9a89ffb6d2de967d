"""The requests of a noisy tenant, as a process of its own: python noise.py URL KEY KIND CONNECTIONS.

It prints an empty line when it has the first response and, at SIGTERM, the count of each status.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import sys
from collections import Counter
from collections.abc import Callable

import aiohttp

CHARACTERS = 1_500_000
_numbers = itertools.count()


def chat(content: object) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": content}], "max_tokens": 5}).encode()


def grammar() -> bytes:
    """A chat with a grammar that takes nearly the time that it may, a new one each time."""
    return GRAMMAR.replace(b'"p_', b'"p%d_' % next(_numbers))


WORDS = "a lot of words " * (CHARACTERS // 15)
LONG_CHAT = chat(WORDS)
TEXT = json.dumps({"inputs": WORDS[:130_000]}).encode()
PATTERNS = {f"p_{i}": {"type": "string", "pattern": f"^[a-z]*{i}[^{i % 9}]+$"} for i in range(2600)}
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object", "properties": PATTERNS}}}
GRAMMAR = json.dumps(
    {"messages": [{"role": "user", "content": "a"}], "max_tokens": 5, "response_format": FORM}
).encode()
STREAM = json.dumps({"inputs": "one two three", "parameters": {"max_new_tokens": 300}}).encode()

KINDS: dict[str, tuple[str, Callable[[], bytes]]] = {
    "tokenize": ("/tokenize", lambda: TEXT),
    "chats": ("/v1/chat/completions", lambda: LONG_CHAT),
    "grammars": ("/v1/chat/completions", grammar),
    "generation": ("/generate_stream", lambda: STREAM),
}


async def main(url: str, key: str, kind: str, connections: int) -> None:
    path, make = KINDS[kind]
    statuses: Counter[int] = Counter()
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, headers=headers, connector=connector) as session:

        async def repeat() -> None:
            while True:
                try:
                    async with session.post(path, data=make()) as response:
                        statuses[response.status] += 1
                        if statuses.total() == 1:
                            print(flush=True)
                        async for _ in response.content.iter_any():
                            pass
                except aiohttp.ClientConnectionError:
                    pass  # refused while the body was still sent

        def stop() -> None:
            for task in running:
                task.cancel()

        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop)
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(repeat()) for _ in range(connections)]
    print(json.dumps(statuses))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:4], int(sys.argv[4])))
