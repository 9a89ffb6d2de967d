"""Clusters over shards of this process, over real gRPC; a test sets their members."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from checked_echo import CheckedEcho
from cluster_listener import Listener
from http_stack import until
from shard_server import ServedShard, running, serve_engine

from text_generation_common.heartbeat import HANG_TIMEOUT_S
from text_generation_proto.values import WarmUpLimits
from text_generation_router.metrics.instruments import Registry
from text_generation_router.metrics.steps import StepMetrics
from text_generation_router.request import QualityOfService, Request, RequestId
from text_generation_router.scheduling.policy import Policy
from text_generation_router.scheduling.scheduler import Scheduler
from text_generation_router.shards.cluster import Cluster
from text_generation_router.shards.first_join import join_first
from text_generation_shard.config import ShardConfig
from text_generation_shard.servicer import ShardServicer


@dataclass
class Members:
    """A cluster, and the source of its members."""

    world: World
    cluster: Cluster
    metrics: StepMetrics
    changed: asyncio.Queue[frozenset[str] | None]

    def set(self, *addresses: str) -> None:
        self.changed.put_nowait(frozenset(addresses) or None)

    def submit(self, new: int, **service: float) -> Listener:
        listener = Listener()
        self.world.requests += 1
        qos = QualityOfService(**service)  # type: ignore[arg-type]
        self.cluster.submit(Request(RequestId(self.world.requests), (1, 2, 3), new, qos=qos), listener)
        return listener

    @property
    def states(self) -> dict[str, str]:
        return {each.address: each.state.value for each in self.cluster.members}

    async def until(self, states: dict[str, str]) -> None:
        await until(lambda: self.states == states)


@dataclass
class World:
    """Shards, and clusters whose members the test sets."""

    folder: Path
    stack: AsyncExitStack
    requests: int = 0
    shards: dict[str, ServedShard] = field(default_factory=dict)
    engines: dict[str, CheckedEcho] = field(default_factory=dict)

    async def shard(self, name: str, servicer: type[ShardServicer] = ShardServicer, **settings: float | str) -> str:
        address = f"unix://{self.folder}/{name}"
        config = ShardConfig(engine="echo", **({"echo_step_ms": 2} | settings))  # type: ignore[arg-type]
        self.engines[address] = engine = CheckedEcho.build(config)
        served = serve_engine(engine, address, servicer, config)
        self.shards[address] = await self.stack.enter_async_context(served)
        return address

    async def cluster(self, *members: str, max_batch_size: int = 64, hang_timeout_s: float = HANG_TIMEOUT_S) -> Members:
        metrics = StepMetrics(Registry())
        cluster = Cluster(Scheduler(Policy(4096, max_batch_size), replicas=0), metrics, hang_timeout_s)
        changed: asyncio.Queue[frozenset[str] | None] = asyncio.Queue()
        joined = await join_first(_one(frozenset(members)), WarmUpLimits(), None, lambda: None)  # type: ignore[arg-type]

        async def follow() -> AsyncIterator[frozenset[str] | None]:
            while True:
                yield await changed.get()

        made = Members(self, cluster, metrics, changed)
        made.set(*members)
        await self.stack.enter_async_context(running(cluster, lambda: cluster.run(follow(), joined, WarmUpLimits())))
        return made


async def _one(members: frozenset[str]) -> AsyncIterator[frozenset[str]]:
    yield members
    await asyncio.Event().wait()


@asynccontextmanager
async def world(folder: Path) -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        yield World(folder, stack)
