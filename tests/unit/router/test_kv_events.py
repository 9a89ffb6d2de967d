"""KV events, read by a subscriber as gateways read them."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from socket import has_dualstack_ipv6

import msgspec
import pytest
import zmq
from host_ledger import HostBlocks
from replica_world import BLOCK_SIZE, ReplicaSetup
from scheduler_checks import nodes_of
from scheduler_world import SchedulerWorld
from world_traffic import act, draw_request

from text_generation_common.exit_codes import CannotServe
from text_generation_router.config import KvEventsConfig, RouterConfig
from text_generation_router.kv_events import END, KvEventsPublisher
from text_generation_router.scheduling.policy import Policy
from text_generation_router.scheduling.prefix_tree import PrefixTree
from text_generation_router.scheduling.scheduler import Scheduler
from text_generation_router.serve.shards import Shards

TOPIC = b"kv@10.0.0.1:3000@model"
Prefix = tuple[str, tuple[int, ...]]
"""The adapter, and all tokens up to the end of a block."""


class Subscriber:
    """Subscribes to a publisher, asks for what it missed, and holds the blocks that its events tell of."""

    def __init__(self, config: KvEventsConfig) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self.events, self.replay = context.socket(zmq.SUB), context.socket(zmq.DEALER)
        self.events.connect(config.endpoint)
        self.events.subscribe(b"kv@")
        self.replay.connect(str(config.replay_endpoint))
        self.blocks: dict[str, dict[int, Prefix]] = {"GPU": {}, "CPU": {}}
        self.next = self.live = 0
        self.kinds: set[str] = set()

    def read(self, number: bytes, batch: bytes) -> None:
        if int.from_bytes(number, "big") != self.next:
            return  # known
        self.next += 1
        at, events, rank = msgspec.msgpack.decode(batch)
        assert (type(at), rank) == (float, 0)
        for kind, *fields in events:
            self.kinds.add(kind)
            getattr(self, kind)(*fields)

    def BlockStored(
        self,
        hashes: list[int],
        parent: int | None,
        tokens: list[int],
        size: int,
        lora: None,
        medium: str,
        adapter: str | None,
    ) -> None:
        blocks, name = self.blocks[medium], adapter or ""
        before = (name, ()) if parent is None else blocks[parent]
        assert (len(tokens), size, before[0], lora) == (len(hashes) * size, BLOCK_SIZE, name, None)
        for number, each in enumerate(hashes):
            assert each not in blocks, "a block is stored once"
            blocks[each] = before = name, before[1] + tuple(tokens[number * size : (number + 1) * size])

    def BlockRemoved(self, hashes: list[int], medium: str) -> None:
        for each in hashes:
            del self.blocks[medium][each]

    def AllBlocksCleared(self) -> None:
        assert not any(self.blocks.values())

    def catch_up(self, publisher: KvEventsPublisher, scheduler: Scheduler) -> None:
        """Read what was published, and what was missed."""
        while self.events.poll(0):
            topic, number, batch = self.events.recv_multipart()
            assert topic == TOPIC
            self.live += 1
            self.read(number, batch)
        self.replay.send_multipart((b"", self.next.to_bytes(8, "big")))
        while True:
            while not self.replay.poll(5):
                publisher.step(scheduler)
            _, number, batch = self.replay.recv_multipart()
            if number == END:
                return
            self.read(number, batch)


@contextmanager
def subscribed(folder: Path) -> Iterator[tuple[KvEventsPublisher, Subscriber]]:
    endpoints = {"endpoint": f"ipc://{folder}/events", "replay_endpoint": f"ipc://{folder}/replay"}
    config = KvEventsConfig(**endpoints, topic=TOPIC.decode())
    publisher = KvEventsPublisher(config)
    subscriber = Subscriber(config)  # after its endpoints exist: a connection is tried again only after a while
    try:
        yield publisher, subscriber
    finally:
        publisher.context.destroy(linger=0)
        subscriber.events.close(linger=0)
        subscriber.replay.close(linger=0)


def content(tree: PrefixTree) -> Iterator[tuple[str, Prefix]]:
    """Yield the salt of each block of a tree, and its prefix."""
    for node in nodes_of(tree):
        path, at = [node], node
        while at.parent is not None:
            at = at.parent
            path.append(at)
        tokens = tuple(array("I", b"".join(bytes(each.key) for each in reversed(path))))
        first = len(tokens) // BLOCK_SIZE - len(node.blocks)
        for number in range(len(node.blocks)):
            yield at.salt, (at.salt.partition("\0")[0], tokens[: (first + number + 1) * BLOCK_SIZE])


def test_the_trees_follow_from_the_events(tmp_path: Path) -> None:
    draw, host = Random(11), HostBlocks(30)
    setup = ReplicaSetup(24, 4, adapters="sql", host=host)
    world = SchedulerWorld(Policy(64, 8), [setup] * 3)
    for _ in range(10):
        world.submit(draw_request(world, draw))
        act(world, "round", 0)
    with subscribed(tmp_path) as (publisher, subscriber):
        for number in range(1500):
            if draw.random() < 0.3:
                world.submit(draw_request(world, draw))
            if draw.random() < 0.02:
                (world.lose if draw.random() < 0.5 else world.open)(draw.randrange(3))
            act(world, "round", draw.randrange(3))
            publisher.step(world.scheduler)
            if number % 50:
                continue
            subscriber.catch_up(publisher, world.scheduler)
            trees = {"GPU": [each.cache.tree for each in world.scheduler.serving], "CPU": []}
            if world.scheduler.serving:
                trees["CPU"] = [each.tree for each in world.scheduler.host_caches]
            for medium, blocks in subscriber.blocks.items():
                cached = {each for tree in trees[medium] for each in content(tree)}
                assert len(blocks) == len(cached), "blocks of two salts are two"
                assert set(blocks.values()) == {prefix for _, prefix in cached}
    assert subscriber.kinds == {"BlockStored", "BlockRemoved", "AllBlocksCleared"}
    assert subscriber.next > 100
    assert subscriber.live > 50
    assert all(subscriber.blocks.values())


@pytest.mark.skipif(not has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_an_address_of_ipv6_is_bound() -> None:
    publisher = KvEventsPublisher(KvEventsConfig(endpoint="tcp://[::1]:*", replay_endpoint="tcp://[::1]:*"))
    publisher.context.destroy(linger=0)


def test_bad_settings_are_refused() -> None:
    for text, reason in (
        ('{"endpoints": "tcp://*:5557"}', "endpoints"),
        ("tcp://*:5557", "JSON"),
        ('{"publisher": "nats"}', "zmq"),
    ):
        with pytest.raises(ValueError, match=reason):
            RouterConfig.of(kv_events_config=text)
    config = RouterConfig.of(kv_events_config='{"endpoint": "ipc:///no/such/folder"}')
    with pytest.raises(CannotServe, match="--kv-events-config: No such file or directory"):
        Shards(config)  # before a shard has loaded its model
