"""KvEventsPublisher: events of the prefix caches on a ZeroMQ socket, as vLLM publishes them and llm-d and Dynamo read them.

A message has three parts: the topic; the number of the batch, 8 bytes; and [time, events, rank] as MessagePack. A subscriber that missed
some sends the number of the first to the replay endpoint, and gets (number, batch) for each that is kept; the number -1 is the end.

    ["BlockStored", hashes, hash of the block before, token ids, block size, None, medium, name of the LoRA adapter]
    ["BlockRemoved", hashes, medium]
    ["AllBlocksCleared"]

A gateway sees one server, whatever its replicas: a block is stored once the first of them has it, and removed once none has. The medium
is GPU for the devices of the replicas, CPU for host caches. The hash of a block is that of all tokens up to its end, of the adapter and
of the cache salt.
"""

import asyncio
import time
from array import array
from collections import Counter, deque
from hashlib import blake2b
from itertools import count
from typing import Any

import msgspec
import zmq

from text_generation_common.exit_codes import CannotServe
from text_generation_router.config import KvEventsConfig
from text_generation_router.scheduling.prefix_node import Run
from text_generation_router.scheduling.prefix_tree import PrefixTree
from text_generation_router.scheduling.scheduler import Scheduler

EVERY_S, SETTLE_S = 0.05, 1.0
"""Seconds between two batches, and before the first one: subscribers connect meanwhile, as ZeroMQ tries it ten times a second."""
REPLAYED_AT_ONCE = 500
"""Most batches that are sent again between two steps of the scheduler: they take 5 ms."""
END = (-1).to_bytes(8, "big", signed=True)
Event = list[Any]
Hashes = dict[int, tuple[int, str]]
"""The hash of each block of a tree, and its adapter."""


class KvEvents:
    """Makes the events of one scheduler."""

    def __init__(self) -> None:
        self._trees: dict[PrefixTree, tuple[str, Hashes]] = {}
        """The medium of each tree, and its blocks as far as events were made."""
        self._holders = Counter[tuple[str, int]]()
        """The number of trees that have a block, by medium and hash."""

    def collect(self, scheduler: Scheduler) -> list[Event]:
        """Return the events since the last call."""
        media = {each.cache.host.tree: "CPU" for each in scheduler.serving if each.cache.host is not None}
        media |= {each.cache.tree: "GPU" for each in scheduler.serving}
        events: list[Event] = []
        for tree in self._trees.keys() - media.keys():
            medium, hashes = self._trees.pop(tree)
            events += self._removed(medium, hashes, list(hashes))
        for tree, medium in media.items():
            if tree not in self._trees:
                tree.record()
            medium, hashes = self._trees.setdefault(tree, (medium, {}))
            changes, tree.changes = tree.changes or [], []
            for change in changes:
                if isinstance(change, tuple):
                    events += self._stored(medium, hashes, change)
                else:
                    events += self._removed(medium, hashes, change)
        return events

    def _stored(self, medium: str, hashes: Hashes, run: Run) -> list[Event]:
        salt, above, key, blocks = run
        before, adapter = (_hash(salt.encode()), salt.partition("\0")[0]) if above is None else hashes[above]
        parent, new, size = None if above is None else before, list[int](), len(key) // len(blocks)
        for number, block in enumerate(blocks):
            before = _hash(before.to_bytes(8, "big") + key[number * size : (number + 1) * size])
            hashes[block] = before, adapter
            self._holders[medium, before] += 1
            if self._holders[medium, before] == 1:
                new.append(before)
            else:  # another tree has it, and so all blocks before it
                parent = before
        tokens = array("I", key[len(key) - len(new) * size :]).tolist()
        event = ["BlockStored", new, parent, tokens, size // 4, None, medium, adapter or None]
        return [event] if new else []

    def _removed(self, medium: str, hashes: Hashes, blocks: list[int]) -> list[Event]:
        gone = [hashes.pop(block)[0] for block in blocks]
        self._holders.subtract((medium, each) for each in gone)
        gone = [each for each in gone if not self._holders[medium, each]]
        for each in gone:
            del self._holders[medium, each]
        return [["BlockRemoved", gone, medium]] if gone else []


class KvEventsPublisher:
    def __init__(self, config: KvEventsConfig) -> None:
        """Open the sockets. Raises CannotServe."""
        self._topic = config.topic.encode()
        self._events, self._numbers = KvEvents(), count()
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        self._replaying: deque[tuple[bytes, ...]] = deque()
        """The messages of a replay that are not sent yet."""
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._publish, self._replay = self.context.socket(zmq.PUB), self.context.socket(zmq.ROUTER)
        self._publish.set_hwm(config.hwm)
        self._replay.set_hwm(config.buffer_steps + 1)  # a ROUTER drops messages above it: a replay would have gaps
        for socket, endpoint in ((self._publish, config.endpoint), (self._replay, config.replay_endpoint or "")):
            # By default there is IPv4 alone.
            socket.setsockopt(zmq.IPV6, any(sign in endpoint for sign in ("*", "::", "[")))
        try:
            # One that names no interface is a subscriber's, as in vLLM.
            own = "*" in config.endpoint or "::" in config.endpoint or config.endpoint.startswith("ipc:")
            (self._publish.bind if own else self._publish.connect)(config.endpoint)
            if config.replay_endpoint is not None:
                self._replay.bind(config.replay_endpoint)
        except zmq.ZMQError as error:
            self.context.destroy(linger=0)
            raise CannotServe(f"--kv-events-config: {error}: {config.endpoint}, {config.replay_endpoint}") from error

    async def run(self, scheduler: Scheduler) -> None:
        """Publish until cancelled."""
        try:
            await asyncio.sleep(SETTLE_S)
            while True:
                self.step(scheduler)
                await asyncio.sleep(EVERY_S)
        finally:
            self.context.destroy(linger=0)

    def step(self, scheduler: Scheduler) -> None:
        """Publish what has changed, and answer one subscriber that asks for batches again."""
        if not self._kept:
            self._send([["AllBlocksCleared"]])
        if events := self._events.collect(scheduler):
            self._send(events)
        if not self._replaying and self._replay.poll(0):
            subscriber, *_, first = self._replay.recv_multipart()
            kept = [each for each in self._kept if each[0] >= first]
            self._replaying.extend((subscriber, b"", *each) for each in (*kept, (END, b"")))
        for _ in range(min(len(self._replaying), REPLAYED_AT_ONCE)):
            self._replay.send_multipart(self._replaying.popleft(), zmq.NOBLOCK)

    def _send(self, events: list[Event]) -> None:
        number = next(self._numbers).to_bytes(8, "big")
        batch = msgspec.msgpack.encode([time.time(), events, 0])  # noqa: TID251 - gateways compare it with their clocks
        self._kept.append((number, batch))
        self._publish.send_multipart((self._topic, number, batch), zmq.NOBLOCK)


def _hash(content: bytes) -> int:
    return int.from_bytes(blake2b(content, digest_size=8).digest(), "big")
