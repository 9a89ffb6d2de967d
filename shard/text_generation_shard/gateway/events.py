"""Events of the engine's KV cache, and its load, for gateways that choose a server by its cached prefixes.

The engine tells of its events from a thread of its own, in TensorRT-LLM's form (_utils.py, KVCacheEventSerializer):

    {"event_id": 7, "data": {"type": "stored", "parent_hash": …, "blocks": [{"block_hash": …, "tokens": [{"token_id": …}]}]}}
    {"event_id": 8, "data": {"type": "removed", "block_hashes": […]}}

Events of other types change nothing that a gateway knows. The last batches are kept, so that a gateway that comes back reads on
where it was. One that is new, or was away for too long, gets a snapshot of the blocks there are. One that is too slow misses
batches, and sees it by their numbers.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from itertools import count, groupby
from typing import Any, NamedTuple

import structlog

from text_generation_proto.gateway import common_pb2 as pb
from text_generation_shard.engine import Engine

MAX_BATCHES = 1024
"""Batches that are kept."""
MAX_EVENTS = 256
"""Events of a batch: each has the tokens of its blocks."""
LOAD_EVERY_S = 1.0
"""Seconds of silence after which the load alone is sent."""
_TIERS = {0: pb.KV_CACHE_TIER_DEVICE, 1: pb.KV_CACHE_TIER_HOST}

log = structlog.get_logger()


class _LiveBlock(NamedTuple):
    """A block of the KV cache."""

    parent: int | None
    tier: pb.KvCacheTier.ValueType
    block: pb.KvBlock


class KvEventLog:
    """The last events of an engine. Made and read on one event loop; `add` is called from any thread."""

    def __init__(self, engine: Engine, num_blocks: Callable[[], int]) -> None:
        """`num_blocks` returns the size of the KV cache in blocks; 0 if it is not known yet."""
        self._engine = engine
        self._num_blocks = num_blocks
        self._loop = asyncio.get_running_loop()
        self._kept: deque[pb.KvEventBatch] = deque(maxlen=MAX_BATCHES)
        self._next = 1
        """Number of the next batch."""
        self._samples = count(1)
        self._added = asyncio.Condition()
        self._live: dict[int, dict[int, _LiveBlock]] = {}
        """Data parallel rank → the blocks there are, by hash. Each stands behind its parent."""

    def add(self, entries: Sequence[Any]) -> None:
        """Take events. Those that make no sense are left out."""
        try:
            by_rank = [(rank, list(events)) for rank, events in groupby(_events(entries), key=lambda pair: pair[0])]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            log.warning("events of the KV cache make no sense", reason=f"{type(error).__name__}: {error}")
            return
        if by_rank:
            with suppress(RuntimeError):  # the shard is stopping
                asyncio.run_coroutine_threadsafe(self._keep(by_rank), self._loop)

    async def batches(self, start: int) -> AsyncIterator[pb.KvEventBatch]:
        """Yield the kept batches from number `start` on, then those that come, and the load; never ends.

        Where `start` is 0 or is kept no longer, a snapshot of the blocks comes first.
        """
        at = start
        if not start or start < self._next - len(self._kept):
            at = self._next
            for batch in self._snapshot():
                yield batch
        yield self._load_only(at)
        while True:
            async with self._added:
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOAD_EVERY_S):
                        await self._added.wait_for(lambda wanted=at: self._next > wanted)  # type: ignore[misc]
                missed = [batch for batch in self._kept if batch.sequence_number >= at]
            for batch in missed:
                yield batch
                at = batch.sequence_number + 1
            if not missed:
                yield self._load_only(at)

    async def _keep(self, by_rank: Sequence[tuple[int, Sequence[tuple[int, pb.KvCacheEvent]]]]) -> None:
        async with self._added:
            for rank, events in by_rank:
                for first in range(0, len(events), MAX_EVENTS):
                    chunk = [event for _, event in events[first : first + MAX_EVENTS]]
                    self._follow(rank, chunk)
                    self._kept.append(
                        pb.KvEventBatch(
                            sequence_number=self._next,
                            timestamp=_now(),
                            events=chunk,
                            dp_rank=rank or None,
                            load=self._load(),
                        )
                    )
                    self._next += 1
            self._added.notify_all()

    def _follow(self, rank: int, events: Sequence[pb.KvCacheEvent]) -> None:
        live = self._live.setdefault(rank, {})
        for event in events:
            for block_hash in event.removed.block_hashes:
                live.pop(block_hash, None)
            parent = event.stored.parent_block_hash if event.stored.HasField("parent_block_hash") else None
            for block in event.stored.blocks:
                live.pop(block.block_hash, None)
                live[block.block_hash] = _LiveBlock(parent, event.stored.tier, block)
                parent = block.block_hash

    def _snapshot(self) -> list[pb.KvEventBatch]:
        """Return the blocks of each rank as stored events in chunks; the last one has the number of the last batch."""
        ranks = {rank: _stored(live.values()) for rank, live in self._live.items() if live}
        if not ranks:
            return []
        # As many chunks as there are numbers, at most.
        numbers = max(1, self._next - 1 - len(ranks))
        size = max(MAX_EVENTS, -(-sum(1 + len(stored) for stored in ranks.values()) // numbers))
        batches = []
        for rank, stored in ranks.items():
            events = [pb.KvCacheEvent(cleared=pb.KvCacheCleared()), *stored]
            chunks = [events[first : first + size] for first in range(0, len(events), size)]
            batches += [
                pb.KvEventBatch(
                    timestamp=_now(),
                    events=chunk,
                    dp_rank=rank or None,
                    snapshot=pb.KvSnapshotChunk(index=index, count=len(chunks), blocks=len(self._live[rank])),
                    load=self._load(),
                )
                for index, chunk in enumerate(chunks)
            ]
        for number, batch in enumerate(batches, self._next - len(batches)):
            batch.sequence_number = number
        return batches

    def _load_only(self, at: int) -> pb.KvEventBatch:
        """Return a batch without events; it has the number of the batch before."""
        load = self._load()
        load.load_only = True
        return pb.KvEventBatch(sequence_number=max(0, at - 1), timestamp=_now(), load=load)

    def _load(self) -> pb.EngineLoad:
        engine, blocks = self._engine, self._num_blocks()
        size, queued = engine.info.block_size, engine.queued
        return pb.EngineLoad(
            running_requests=max(0, engine.running - queued),
            waiting_requests=queued,
            token_usage=min(1.0, engine.used_blocks / blocks) if blocks else 0.0,
            max_running_requests=engine.info.max_slots,
            num_used_tokens=engine.used_blocks * size,
            max_total_num_tokens=blocks * size or None,
            sample=next(self._samples),
        )


def _events(entries: Sequence[Any]) -> Iterator[tuple[int, pb.KvCacheEvent]]:
    """Yield (data parallel rank, event); some versions of TensorRT-LLM have lists of events."""
    for entry in entries:
        for event in entry if isinstance(entry, list) else (entry,):
            if event and (message := _event(event["event_id"], event["data"])) is not None:
                yield int(event.get("attention_dp_rank") or 0), message


def _event(event_id: int, data: Mapping[str, Any]) -> pb.KvCacheEvent | None:
    if data["type"] == "stored":
        stored = pb.KvBlocksStored(
            blocks=[_block(block) for block in data["blocks"]],
            parent_block_hash=None if data["parent_hash"] is None else _signed(data["parent_hash"]),
        )
        if data["blocks"]:
            stored.tier = _TIERS.get(data["blocks"][0].get("cache_level", 0), pb.KV_CACHE_TIER_UNSPECIFIED)
        return pb.KvCacheEvent(event_id=event_id, stored=stored)
    if data["type"] == "removed":
        removed = pb.KvBlocksRemoved(block_hashes=[_signed(block_hash) for block_hash in data["block_hashes"]])
        return pb.KvCacheEvent(event_id=event_id, removed=removed)
    return None


def _stored(live: Iterable[_LiveBlock]) -> list[pb.KvCacheEvent]:
    """Return events that store the blocks, one for each run of blocks that follow one another."""
    events: list[pb.KvCacheEvent] = []
    last: int | None = None
    for parent, tier, block in live:
        if parent is None or parent != last or events[-1].stored.tier != tier:
            events.append(pb.KvCacheEvent(stored=pb.KvBlocksStored(parent_block_hash=parent, tier=tier)))
        events[-1].stored.blocks.append(block)
        last = block.block_hash
    return events


def _block(block: Mapping[str, Any]) -> pb.KvBlock:
    tokens = [token["token_id"] for token in block["tokens"]]
    return pb.KvBlock(
        block_hash=_signed(block["block_hash"]),
        token_ids=tokens,
        block_size=len(tokens),
        cache_level=block.get("cache_level", 0),
    )


def _signed(block_hash: int) -> int:
    """Return a hash of 64 bits as the signed number of the wire."""
    return (int(block_hash) + (1 << 63)) % (1 << 64) - (1 << 63)


def _now() -> float:
    return datetime.now(UTC).timestamp()
