"""A shard as a process, for tests that speak its wire contract."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from text_generation_proto.client import ShardClient


@asynccontextmanager
async def shard(address: str, *arguments: str) -> AsyncIterator[tuple[ShardClient, asyncio.subprocess.Process]]:
    """An echo shard at `address`, ready; ended with the block."""
    process = await asyncio.create_subprocess_exec(
        Path(sys.executable).with_name("text-generation-shard"),
        "--engine=echo",
        f"--address={address}",
        *arguments,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with ShardClient.connect(address) as client:
            await client.ready(30)
            yield client, process
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
