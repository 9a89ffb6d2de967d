"""Shards and a router under launchers of their own, as on different machines."""

from __future__ import annotations

import asyncio
from contextlib import closing
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from servers import free_port
from stack import Stack, generate, running

pytestmark = [pytest.mark.system, pytest.mark.full]

TOKEN = {"SHARD_TOKEN": "hush"}


async def shards_of(session: aiohttp.ClientSession, url: str) -> dict[str, str]:
    async with session.get(f"{url}/info") as response:
        info: dict[str, Any] = await response.json()
    return {shard["address"]: shard["state"] for shard in info["shards"]}


async def until_shards(session: aiohttp.ClientSession, url: str, expected: dict[str, str]) -> None:
    async with asyncio.timeout(20):
        while await shards_of(session, url) != expected:  # noqa: ASYNC110 - it crosses processes
            await asyncio.sleep(0.05)


async def test_a_router_waits_for_its_shards_and_follows_those_that_a_file_names(
    demo_model: Path, session: aiohttp.ClientSession, tmp_path: Path
) -> None:
    members = tmp_path / "shards.yaml"
    good, odd, wrong_token = (free_port() for _ in range(3))
    address = {port: f"127.0.0.1:{port}" for port in (good, odd, wrong_token)}
    with closing(Stack(demo_model, "--parts=router", f"--shards=file://{members}", environ=TOKEN)) as router:
        router.wait_for("alive, waiting for a shard", "router")
        for path, status in (("/health/live", 200), ("/health", 503), ("/generate", 503)):
            async with session.get(f"{router.url}{path}") as response:
                assert response.status == status, path
        members.write_text(f"- {address[good]}\n")
        parts = ("--parts=shards", "--shard-tcp-port")
        with (
            running(demo_model, *parts, str(good), environ=TOKEN),
            running(demo_model, *parts, str(odd), "--echo-max-sequence-length=99", environ=TOKEN),
            running(demo_model, *parts, str(wrong_token), environ={"SHARD_TOKEN": "other"}),
        ):
            router.wait_for("ready")
            assert await generate(session, router.url)
            members.write_text("".join(f"- {each}\n" for each in address.values()))
            states = {address[good]: "serving", address[odd]: "refused", address[wrong_token]: "refused"}
            await until_shards(session, router.url, states)
            async with session.get(f"{router.url}/metrics") as response:
                assert 'text_generation_shards{state="refused"} 2.0' in await response.text()
            assert await generate(session, router.url)
        await until_shards(session, router.url, states | {address[good]: "joining"})
