"""A shard process of rank 1: it answers health and Info only."""

from __future__ import annotations

import tempfile
from pathlib import Path

import grpc
import pytest
from shard_process import shard


async def test_a_follower_refuses_everything_but_info_and_health() -> None:
    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        address = f"unix://{folder}/shard"
        rank = ("--rank=1", "--world-size=2", f"--group-address=unix://{Path(folder, 'group')}")
        async with shard(address, *rank) as (client, _):
            info = await client.info()
            assert (info.rank, info.world_size) == (1, 2)
            for call in (client.warm_up, client.run().read):
                with pytest.raises(grpc.aio.AioRpcError, match="rank 1 follows: call rank 0") as refused:
                    await call()
                assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
