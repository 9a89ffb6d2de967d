"""Loads of adapters on replicas that are lost meanwhile."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from text_generation_common.waiting import background
from text_generation_proto.client import ShardClient
from text_generation_proto.v1 import shard_pb2 as pb
from text_generation_router.errors import NotFound
from text_generation_router.scheduling.policy import Policy
from text_generation_router.scheduling.scheduler import Scheduler
from text_generation_router.shards.adapters import ReplicaAdapters
from text_generation_router.shards.join import ReplicaInfo


async def test_a_channel_that_closes_before_a_call_ends_no_other_work(tmp_path: Path) -> None:
    scheduler = Scheduler(Policy(4096, 8))
    adapters = ReplicaAdapters(scheduler, lambda _: False)
    info = ReplicaInfo(pb.InfoResponse(loads_adapters=True), pb.WarmUpResponse(num_blocks=8, block_size=16))
    async with background(adapters.run()):
        await asyncio.sleep(0)
        async with ShardClient.connect(f"unix://{tmp_path}/shard") as client:
            await adapters.equip((0,), client, info)
            scheduler.open(0, info.specs[0])
        await adapters.change("sql", "sql")
        assert adapters.names == ["sql"]
        await adapters.change("sql", None)
        with pytest.raises(NotFound):
            await adapters.change("sql", None)
