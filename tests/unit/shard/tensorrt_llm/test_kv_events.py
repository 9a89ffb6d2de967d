"""Events of the KV cache, from the stand-in to a client of the gateway protocol."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from gateway_server import ask, echo, serve_gateway
from standin import read_log

from text_generation_proto.gateway import common_pb2 as common
from text_generation_shard.engines.tensorrt_llm.engine import TensorRTEngine

PROMPT = list(range(100, 180))
Build = Callable[..., TensorRTEngine]


class Subscription:
    """A subscription, read to its end in the background."""

    def __init__(self, stub: Any, start: int = 0) -> None:  # noqa: ANN401 - a stub
        self._call = stub.SubscribeKvEvents(common.SubscribeKvEventsRequest(start_sequence_number=start))
        self.batches: list[common.KvEventBatch] = []

    async def until(self, holds: Callable[[list[common.KvCacheEvent]], bool]) -> list[common.KvCacheEvent]:
        """Read until the events fulfil a condition; return them."""
        async with asyncio.timeout(20):
            while not holds(events := [event for batch in self.batches for event in batch.events]):
                self.batches.append(await self._call.read())
        return events


async def test_stored_and_removed_blocks_reach_a_gateway(built: Build, tmp_path: Path) -> None:
    engine = built(gateway=True, log=tmp_path / "log")
    async with serve_gateway(engine, tmp_path) as gateway:
        first = Subscription(gateway.stub)
        await first.until(lambda _: bool(first.batches))
        load = first.batches[0].load
        assert (load.load_only, load.running_requests, load.max_running_requests) == (True, 0, 256)
        await gateway.stream(ask(PROMPT, 4))
        [event] = await first.until(bool)
        blocks = event.stored.blocks
        assert [list(block.token_ids) for block in blocks] == [PROMPT[:32], PROMPT[32:64]]
        assert (event.stored.tier, blocks[0].block_size) == (common.KV_CACHE_TIER_DEVICE, 32)
        assert not event.stored.HasField("parent_block_hash")
        await gateway.stream(ask([*PROMPT[:64], *range(200, 240)], 4))
        _, longer = await first.until(lambda events: len(events) == 2)
        assert longer.stored.parent_block_hash == blocks[1].block_hash
        for start in range(300, 1200, 100):  # more blocks than the cache keeps
            await gateway.stream(ask([start + token % 90 for token in range(300)], 1))
        events = await first.until(lambda events: any(event.HasField("removed") for event in events))
        removed = next(event.removed for event in events if event.HasField("removed"))
        assert removed.block_hashes[0] == blocks[0].block_hash
        numbers = [batch.sequence_number for batch in first.batches if batch.events]
        assert numbers == list(range(1, len(numbers) + 1))
        again = Subscription(gateway.stub, start=1)
        assert (await again.until(lambda found: len(found) >= len(events)))[: len(events)] == events
        late = Subscription(gateway.stub)
        live: dict[int, common.KvBlock] = {}
        for event in events:
            live |= {block.block_hash: block for block in event.stored.blocks}
            for block_hash in event.removed.block_hashes:
                del live[block_hash]
        cleared, *stored = await late.until(lambda found: sum(len(e.stored.blocks) for e in found) >= len(live))
        assert cleared.HasField("cleared")
        assert {block.block_hash: block for event in stored for block in event.stored.blocks} == live
        seen: set[int] = set()
        for event in stored:
            assert event.stored.parent_block_hash in seen | {0} or event.stored.parent_block_hash not in live
            seen |= {block.block_hash for block in event.stored.blocks}
        [chunk] = late.batches
        assert (chunk.snapshot.index, chunk.snapshot.count, chunk.snapshot.blocks) == (0, 1, len(live))
        assert chunk.sequence_number == numbers[-1]
        await gateway.stream(ask([*range(2000, 2040)], 1))
        await late.until(lambda found: found[-1].event_id > 0)
        assert late.batches[-1].sequence_number == numbers[-1] + 1
    assert not read_log(tmp_path / "log").of("blocked")


async def test_engines_without_events_say_so(built: Build, tmp_path: Path) -> None:
    for engine in (echo(), built(gateway=True, options="{kv_cache_config: {event_buffer_max_size: 0}}"), built()):
        async with serve_gateway(engine, tmp_path) as gateway:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await Subscription(gateway.stub).until(bool)
            assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
