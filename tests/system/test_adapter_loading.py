"""LoRA adapters that are loaded over HTTP, in a server of processes: HTTP workers, replicas, restarts."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from stack import running

pytestmark = pytest.mark.system

WORDS, BACKWARDS = " one two three", " three two one"


async def test_every_process_knows_a_loaded_adapter_also_after_restarts(echo_model: Path, tmp_path: Path) -> None:
    """The echo engine with an adapter writes the prompt backwards."""
    (tmp_path / "sql").mkdir()
    flags = ("--http-workers", "2", "--num-replicas", "2", "--lora-modules-dir", str(tmp_path))
    with running(echo_model, *flags) as stack:

        async def post(path: str, body: dict[str, Any]) -> tuple[int, str]:
            """Each request has a connection of its own: any of the HTTP workers may get it."""
            async with aiohttp.ClientSession(stack.url) as session, session.post(path, json=body) as response:
                return response.status, await response.text()

        async def answers(status: int, text: str = "") -> bool:
            body = {"inputs": WORDS, "parameters": {"adapter_id": "sql", "max_new_tokens": 3}}
            replies = [await post("/generate", body) for _ in range(8)]
            return all(found == status and text in answer for found, answer in replies)

        assert (await post("/v1/load_lora_adapter", {"lora_name": "sql", "lora_path": "../sql"}))[0] == 400
        assert (await post("/v1/load_lora_adapter", {"lora_name": "sql", "lora_path": "sql"}))[0] == 200
        assert await answers(200, BACKWARDS)
        stack.kill("shard", 0)
        await asyncio.to_thread(stack.wait_for, "shard joined again", "router-scheduler")
        assert await answers(200, BACKWARDS)
        stack.kill("shard", 1)  # the one that was restarted serves alone
        assert await answers(200, BACKWARDS)
        assert (await post("/v1/unload_lora_adapter", {"lora_name": "sql"}))[0] == 200
        assert await answers(404)
