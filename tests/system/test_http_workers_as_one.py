"""The launcher with four HTTP workers at one port: a client cannot tell them from one server."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from pathlib import Path

import aiohttp
import pytest
from stack import Stack, running

KEYS = """
[[keys]]
key = "sk-operator"
tenant = "operator"
trust_headers = true
[[keys]]
key = "sk-limited"
tenant = "limited"
requests_per_minute = 10
"""
WORKERS = 4
BODY = {"inputs": "one two three four", "parameters": {"max_new_tokens": 6}}


async def generate(stack: Stack, key: str) -> int:
    """The status of a request on a connection of its own, which reaches any worker."""
    headers = {"authorization": f"Bearer {key}"}
    async with (
        aiohttp.ClientSession() as client,
        client.post(f"{stack.url}/generate", json=BODY, headers=headers) as got,
    ):
        await got.read()
        return got.status


async def scrape(stack: Stack) -> tuple[float, float]:
    """The generations that succeeded, and the open connections."""
    headers = {"authorization": "Bearer sk-operator"}
    async with aiohttp.ClientSession() as client, client.get(f"{stack.url}/metrics", headers=headers) as got:
        lines = dict(line.rsplit(" ", 1) for line in (await got.text()).splitlines() if line[0] != "#")
    return float(lines["tgi_request_success"]), float(lines["text_generation_connections"])


async def many(stack: Stack, key: str, count: int) -> Counter[int]:
    """The statuses of requests at the same time."""
    async with asyncio.TaskGroup() as tasks:
        asked = [tasks.create_task(generate(stack, key)) for _ in range(count)]
    return Counter(task.result() for task in asked)


@pytest.mark.full
async def test_metrics_and_rate_limits_are_those_of_all_workers(echo_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    await asyncio.to_thread(file.write_text, KEYS)
    flags = f"--api-keys-file={file}", f"--http-workers={WORKERS}"
    with running(echo_model, *flags) as stack:
        assert await many(stack, "sk-limited", 100) == {200: 10, 429: 90}
        assert await many(stack, "sk-operator", 100) == {200: 100}
        for _ in range(4 * WORKERS):
            assert await scrape(stack) == (110, 1)
        await asyncio.to_thread(file.write_text, KEYS.replace("sk-operator", "sk-new"))
        stack.launcher.send_signal(signal.SIGHUP)
        async with asyncio.timeout(60):
            while await many(stack, "sk-new", 4 * WORKERS) != {200: 4 * WORKERS}:  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.1)
        assert await many(stack, "sk-operator", 4 * WORKERS) == {401: 4 * WORKERS}
        assert (await many(stack, "sk-limited", 4 * WORKERS))[200] < 10, "its level was kept"
