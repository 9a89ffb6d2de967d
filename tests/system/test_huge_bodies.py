"""Huge bodies on every route that takes one: a stream and a probe beside them go on, and memory comes back.

TEST_FULL=1 sends every body to every route; otherwise the heaviest ones go to the route they are meant for.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from full_grid import full
from harm import TRIES, beside
from stack import running

SIZE = 1_900_000
MOST_MEMORY = 64 << 20
ROUTES = (
    *("/", "/generate", "/generate_stream", "/tokenize", "/chat_tokenize", "/detokenize", "/invocations", "/vertex"),
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"),
    "/v2/models/m/versions/1/infer",
)
JSON = {"content-type": "application/json"}
USER = b'{"role":"user","content":"hi"}'
CHAT = b'{"max_tokens":2,"messages":[' + USER + b"]"


Body = Callable[[], bytes]
"""A function that makes a body: all of them take two seconds."""


def listed(before: bytes, entry: bytes, after: bytes, most: int = 10**9, size: int = SIZE) -> Body:
    """A body with as many equal entries as fit."""
    count = min(most, (size - len(before) - len(after)) // (len(entry) + 1))
    return lambda: before + b",".join([entry] * count) + after


CALL = b'{"id":"a","type":"function","function":{"name":"f","arguments":"{}"}}'
CALLING = b'{"role":"assistant","content":null,"tool_calls":[' + CALL + b"]}"
PART = b'{"role":"user","content":[{"type":"text","text":"hi"}]}'
BODIES: dict[str, Body] = {
    "tools of a chat": listed(CHAT + b',"tools":[', b'{"function":{"name":"a"}}', b"]}"),
    "tools of messages": listed(CHAT + b',"tools":[', b'{"name":"a"}', b"]}"),
    "tools of a response": listed(b'{"input":"a","tools":[', b'{"type":"function","name":"a","parameters":{}}', b"]}"),
    "lists of ids": listed(b'{"prompt":[', b"[1]", b"]}"),
    "token ids": listed(b'{"prompt":[', b"300", b'],"max_tokens":2}'),
    "tokens": listed(b'{"ids":[', b"300", b"]}"),
    "prompts": listed(b'{"prompt":[', b'"a"', b"]}"),
    "messages": listed(b'{"max_tokens":2,"messages":[', USER, b"]}"),
    "10,000 messages": listed(b'{"max_tokens":2,"messages":[', PART, b"]}", 10_000),
    "calls": listed(b'{"max_tokens":2,"messages":[' + USER + b",", CALLING, b"]}"),
    "8,000 calls": listed(b'{"max_tokens":2,"messages":[' + USER + b",", CALLING, b"]}", 8_000),
    "calls of a message": listed(b'{"max_tokens":2,"messages":[{"role":"assistant","tool_calls":[', CALL, b"]}]}"),
    "objects in arguments": listed(
        b'{"max_tokens":2,"messages":[{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":"[',
        b"{}",
        b']"}}]}]}',
        size=30_000_000,
    ),
    "objects in a call": listed(
        b'{"input":[{"type":"function_call","call_id":"a","name":"f","arguments":"[',
        b"{}",
        b']"}]}',
        size=30_000_000,
    ),
    "template arguments": lambda: (
        CHAT + b',"chat_template_kwargs":{' + b",".join(b'"%06d":1' % each for each in range(SIZE // 11)) + b"}}"
    ),
    "empty arrays": listed(b"[", b"[]", b"]"),
    "empty objects": listed(b'{"inputs":[', b"{}", b"]}"),
    "nested objects": listed(b'{"inputs":[', b'{"":' * 120 + b"1" + b"}" * 120, b"]}"),
    "deep arrays": lambda: b'{"inputs":' + b"[" * (SIZE // 2),
    "brackets in a text": lambda: b'{"inputs":"' + b"[" * SIZE + b'"}',
    "quotes in a text": lambda: b'{"inputs":"' + rb"[\"" * (SIZE // 3) + b'"}',
    "stop strings": listed(b'{"inputs":"a","parameters":{"stop":[', b'"a"', b"]}}"),
    "bytes": listed(b'{"inputs":[{"name":"a","shape":[1],"datatype":"BYTES","data":[', b"97", b"]}]}"),
    "instances": listed(b'{"instances":[', b'{"inputs":"a"}', b"]}"),
    "a model's name": lambda: CHAT + b',"model":"' + b"a" * SIZE + b'"}',
    "words": lambda: b'{"inputs":"' + b"a lot of words " * (SIZE // 15) + b'"}',
    "words of a chat": lambda: b'{"messages":[{"role":"user","content":"' + b"a lot of words " * (SIZE // 15) + b'"}]}',
}


@pytest.fixture(scope="module")
def server(echo_model: Path) -> Iterator[tuple[str, list[psutil.Process]]]:
    with running(echo_model, "--echo-step-ms", "10") as stack:
        yield stack.url, [stack.router()["router"], stack.shard(0)]


TARGETS = {
    "/v1/chat/completions": (
        *("tools of a chat", "10,000 messages", "8,000 calls", "objects in arguments", "template arguments"),
    ),
    "/v1/responses": ("objects in a call",),
    "/v1/completions": ("lists of ids", "prompts"),
    "/v1/messages": ("tools of messages",),
    "/generate": ("empty objects", "brackets in a text", "quotes in a text"),
    "/generate_stream": ("deep arrays",),
    "/tokenize": ("words of a chat",),
    "/v2/models/m/versions/1/infer": ("bytes",),
}
"""The bodies that hold the event loop up longest if they are read on it, and the route that each is meant for."""


def attacks() -> list[tuple[str, str]]:
    if os.environ.get("TEST_FULL"):
        return [(name, route) for name in BODIES for route in ROUTES]
    return [(name, route) for route, names in TARGETS.items() for name in names]


async def attack(url: str, processes: Sequence[psutil.Process], route: str, body: bytes) -> str | None:
    """Send a body. Return a description of the harm, or None."""
    router = processes[0]
    memory = router.memory_info().rss
    async with beside(url, processes) as measured, aiohttp.ClientSession() as session:
        received = 0
        async with session.post(url + route, data=io.BytesIO(body), headers=JSON) as response:
            async for chunk in response.content.iter_any():
                received += len(chunk)
        if response.status >= 500 and response.status != 503:
            return f"status {response.status}"
        if received > 20 * len(body) and route not in (
            "/tokenize",
            "/chat_tokenize",
        ):  # a list of tokens may take 1 kB for each
            return f"{received} bytes"
    grown = router.memory_info().rss - memory
    return f"{grown >> 20} MB more" if grown > MOST_MEMORY else measured.harm


@pytest.mark.parametrize(("name", "route"), attacks())
async def test_a_huge_body_harms_no_other_request(
    server: tuple[str, list[psutil.Process]], name: str, route: str, record_property: Callable[[str, str], None]
) -> None:
    body, harms = BODIES[name](), []
    for _ in range(TRIES):
        harm = await attack(*server, route, body)
        if harm is None:
            record_property("bar", f"{name} to {route}: no harm")
            return
        harms.append(harm)
    record_property("bar", f"{name} to {route}: {harms[-1]}")
    raise AssertionError(harms)


async def test_a_body_of_chunks_of_one_byte_harms_no_other_request(
    server: tuple[str, list[psutil.Process]], record_property: Callable[[str, str], None]
) -> None:
    url, processes = server
    body = b'{"inputs":"' + b"a" * 400_000 + b'"}'
    head = b"POST /generate HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    host, _, port = url.removeprefix("http://").partition(":")
    harms = []
    while len(harms) < TRIES:
        async with beside(url, processes) as measured:
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(head + chunks)
            assert (await reader.readline()).startswith(b"HTTP/1.1 422 ")
            writer.close()
        record_property("bar", f"chunks of one byte: {measured}")
        if measured.harm is None:
            return
        harms.append(measured.harm)
    raise AssertionError(harms)


HI = {"messages": [{"role": "user", "content": "hi"}], "ignore_eos": True}
ECHO = {"echo": True, "logprobs": 20, "max_tokens": 1}
BEST = {"best_of": 100, "do_sample": True, "details": True, "top_n_tokens": 5, "max_new_tokens": 400}
SCORED = {"include": ["message.output_text.logprobs"], "top_logprobs": 20, "max_output_tokens": 4000}
LETTERS = " ".join("abcdefghijklmnopqrstuvwxyz" * (SIZE // 52))
ANSWERS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": LETTERS}]}),
    ("/v1/completions", {"prompt": ["a few words " * 1200] * 128, **ECHO}),
    ("/v1/completions", {"prompt": ["a few words " * 1200] * 128, "stream": True, **ECHO}),
    ("/v1/completions", {"prompt": "a " * 16_000, "n": 128, **ECHO, "logprobs": 5}),
    ("/v1/completions", {"prompt": "a few words " * 1200, **ECHO}),
    ("/v1/completions", {"prompt": "a few words " * 1200, "stream": True, **ECHO}),
    ("/v1/completions", {"prompt": "a few words " * 1200, "prompt_logprobs": 20, **ECHO}),
    (
        "/v1/completions",
        {"prompt": ["a few words " * 1200] * 8, "echo": True, "n": 16, "stream": True, "max_tokens": 1},
    ),
    ("/v1/chat/completions", {**HI, "n": 128, "logprobs": True, "top_logprobs": 20, "max_tokens": 400}),
    ("/v1/chat/completions", {**HI, "n": 128, "max_tokens": 400}),
    ("/v1/chat/completions", {**HI, "logprobs": True, "top_logprobs": 20, "max_tokens": 4000}),
    ("/v1/responses", {"input": "hi", **SCORED}),
    ("/v1/responses", {"input": "hi", "stream": True, **SCORED}),
    (
        "/generate",
        {"inputs": "a few words " * 300, "parameters": BEST},
    ),
    ("/v1/completions", {"prompt": "a b " * 4_000, "n": 128, "echo": True, "max_tokens": 1}),
    ("/tokenize", {"inputs": LETTERS}),
    ("/tokenize", {"prompt": LETTERS}),
    ("/tokenize", {"inputs": ("1" * 120_000 + " a ") * 15}),
    ("/tokenize", {"inputs": "\U00013000" * 30_000}),
    ("/chat_tokenize", {"messages": [{"role": "user", "content": LETTERS}]}),
    ("/generate", {"inputs": LETTERS, "parameters": {"truncate": 9, "max_new_tokens": 2}}),
    ("/detokenize", {"ids": [300] * (1 << 18)}),
]


@pytest.mark.parametrize("workers", ["0", full("3")])
async def test_answers_of_any_size_take_little_memory(echo_model: Path, workers: str) -> None:
    flags = ("--http-workers", workers) if workers != "0" else ()
    with running(echo_model, "--echo-step-ms=1", "--max-best-of=128", *flags) as stack:

        def memory() -> int:
            return sum(process.memory_info().rss for process in stack.children())

        async with aiohttp.ClientSession(stack.url) as session:
            for path, body in ANSWERS if os.environ.get("TEST_FULL") else ANSWERS[:4]:
                before = most = memory()
                sent = io.BytesIO(json.dumps(body).encode())
                asked = asyncio.create_task(session.post(path, data=sent, headers=JSON))  # noqa: TID251 - ends with this block
                while not asked.done():
                    await asyncio.sleep(0.02)
                    most = max(most, memory())
                async with await asked as response:
                    assert response.status in (200, 400), await response.text()
                    async for _ in response.content.iter_any():
                        most = max(most, memory())
                assert most - before <= MOST_MEMORY, (path, body, (most - before) >> 20)


@pytest.mark.full
async def test_memory_comes_back_after_a_burst(echo_model: Path) -> None:
    chat = BODIES["words of a chat"]()
    with running(echo_model) as stack:
        router = stack.router()["router"]

        async def burst(count: int) -> None:
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

                async def ask() -> None:
                    body = io.BytesIO(chat)
                    async with session.post(f"{stack.url}/v1/chat/completions", data=body, headers=JSON) as response:
                        assert response.status in (400, 408, 429, 503)

                async with asyncio.TaskGroup() as tasks:
                    for _ in range(count):
                        tasks.create_task(ask())

        await burst(2)
        before = router.memory_info().rss
        await burst(40)
        async with asyncio.timeout(30):
            while router.memory_info().rss > before + (50 << 20):  # noqa: ASYNC110 - memory has no event
                await asyncio.sleep(0.1)
