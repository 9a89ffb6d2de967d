"""A shard as a process, for tests that speak its wire contract."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from checked_echo import environ

from text_generation_common.shard_access import ShardAccess
from text_generation_proto.client import RunCall, ShardClient
from text_generation_proto.v1 import shard_pb2 as pb


@asynccontextmanager
async def shard(
    address: str, *arguments: str, access: ShardAccess | None = None, **options: int
) -> AsyncIterator[tuple[ShardClient, asyncio.subprocess.Process]]:
    """An echo shard at `address`, ready; ended with the block. `options` are those of `checked_echo.build`."""
    access = access or ShardAccess.of()
    process = await asyncio.create_subprocess_exec(
        Path(sys.executable).with_name("text-generation-shard"),
        "--engine=echo",
        f"--address={address}",
        *arguments,
        env=os.environ | environ(**options) | access.environ,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with ShardClient.connect(address, access) as client:
            await client.ready(30)
            yield client, process
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


@asynccontextmanager
async def running(client: ShardClient) -> AsyncIterator[RunCall]:
    """A Run session; cancelled with the block."""
    call = client.run()
    try:
        yield call
    finally:
        call.cancel()


async def report(call: RunCall) -> pb.StepReport:
    """Read the next report."""
    async with asyncio.timeout(10):
        read = await call.read()
    assert isinstance(read, pb.StepReport)
    return read
