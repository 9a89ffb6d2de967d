"""Shards that come and go under a running cluster, over real gRPC: join, leave, refused, taken."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from checked_echo import CheckedEcho
from cluster_listener import Listener
from http_stack import until
from shard_server import ServedShard, running, serve_engine

from text_generation_proto import client
from text_generation_proto.values import WarmUpLimits
from text_generation_router.metrics.instruments import Registry
from text_generation_router.metrics.steps import StepMetrics
from text_generation_router.request import Request, RequestId
from text_generation_router.scheduling.policy import Policy
from text_generation_router.scheduling.scheduler import Scheduler
from text_generation_router.shards import member
from text_generation_router.shards.cluster import Cluster
from text_generation_router.shards.first_join import join_first
from text_generation_shard.config import ShardConfig
from text_generation_shard.servicer import RunContext, ShardServicer


@dataclass
class World:
    """Shards, and clusters whose members the test sets."""

    folder: Path
    stack: AsyncExitStack
    requests: int = 0
    shards: dict[str, ServedShard] = field(default_factory=dict)
    engines: dict[str, CheckedEcho] = field(default_factory=dict)

    async def shard(self, name: str, servicer: type[ShardServicer] = ShardServicer, **settings: float) -> str:
        address = f"unix://{self.folder}/{name}"
        engine = CheckedEcho.build(ShardConfig(engine="echo", **({"echo_step_ms": 2} | settings)))  # type: ignore[arg-type]
        self.engines[address] = engine
        self.shards[address] = await self.stack.enter_async_context(serve_engine(engine, address, servicer))
        return address

    async def cluster(self, *members: str) -> Members:
        cluster = Cluster(Scheduler(Policy(4096, 64), replicas=0), StepMetrics(Registry()))
        changed: asyncio.Queue[frozenset[str] | None] = asyncio.Queue()
        joined = await join_first(_one(frozenset(members)), WarmUpLimits(), None, lambda: None)  # type: ignore[arg-type]

        async def follow() -> AsyncIterator[frozenset[str] | None]:
            while True:
                yield await changed.get()

        made = Members(self, cluster, changed)
        made.set(*members)
        await self.stack.enter_async_context(running(cluster, lambda: cluster.run(follow(), joined, WarmUpLimits())))
        return made


class OlderServicer(ShardServicer):
    """A shard of a version that does not say that a session is open."""

    async def Run(self, request_iterator: object, context: RunContext) -> None:
        await super().Run(request_iterator, _Silent(context))  # type: ignore[arg-type]


class _Silent:
    """A context that sends no initial metadata of its own."""

    def __init__(self, context: RunContext) -> None:
        self._context = context

    def __getattr__(self, name: str) -> object:
        return getattr(self._context, name)

    async def send_initial_metadata(self, metadata: object) -> None:
        """Send nothing."""


@dataclass
class Members:
    """A cluster, and the source of its members."""

    world: World
    cluster: Cluster
    changed: asyncio.Queue[frozenset[str] | None]

    def set(self, *addresses: str) -> None:
        self.changed.put_nowait(frozenset(addresses) or None)

    def submit(self, new: int) -> Listener:
        listener = Listener()
        self.world.requests += 1
        self.cluster.submit(Request(RequestId(self.world.requests), (1, 2, 3), new), listener)
        return listener

    @property
    def states(self) -> dict[str, str]:
        return {each.address: each.state.value for each in self.cluster.members}

    async def until(self, states: dict[str, str]) -> None:
        await until(lambda: self.states == states)


async def _one(members: frozenset[str]) -> AsyncIterator[frozenset[str]]:
    yield members
    await asyncio.Event().wait()


@asynccontextmanager
async def world(folder: Path) -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        yield World(folder, stack)


async def test_a_shard_that_leaves_finishes_its_requests_and_one_that_joins_gets_some(tmp_path: Path) -> None:
    async with world(tmp_path) as shards:
        a, b = await shards.shard("a"), await shards.shard("b")
        router = await shards.cluster(a)
        first = [router.submit(300) for _ in range(2)]
        router.set(a, b)
        await router.until({a: "serving", b: "serving"})
        second = [router.submit(300) for _ in range(2)]
        await until(lambda: shards.engines[b].running == 2)
        router.set(b)
        await router.until({a: "draining", b: "serving"})
        third = router.submit(5)
        for listener in (*first, *second, third):
            await listener.over.wait()
        assert all(listener.tokens == [1, 2, 3] * 100 for listener in (*first, *second))
        await router.until({b: "serving"})
        router.set(a, b)
        await router.until({a: "serving", b: "serving"})
        stats = router.cluster.scheduler.stats()
        assert (stats.moves, stats.num_replicas) == (0, 2)
        assert [each.number for each in router.cluster.members] == [1, 2], "a number is used once"


async def test_what_a_leaving_shard_does_not_finish_moves_unless_nothing_else_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(member, "LEAVE_S", 0.2)
    async with world(tmp_path) as shards:
        a, b, odd = (
            await shards.shard("a"),
            await shards.shard("b"),
            await shards.shard("odd", echo_max_sequence_length=7),
        )
        router = await shards.cluster(a)
        alone = router.submit(300)
        router.set(odd)
        await alone.over.wait()
        await router.until({odd: "refused"})
        assert not router.cluster.ready
        router.set(odd, a, b)
        await router.until({odd: "refused", a: "serving", b: "serving"})
        assert "max_sequence_length" in next(each.reason for each in router.cluster.members if each.address == odd)
        moved = [router.submit(1000) for _ in range(2)]
        await until(lambda: shards.engines[a].running == shards.engines[b].running == 1)
        router.set(b)
        for listener in (alone, *moved):
            await listener.over.wait()
            assert listener.error is None
        assert [len(listener.tokens) for listener in (alone, *moved)] == [300, 1000, 1000]
        assert router.cluster.scheduler.stats().moves == 1
        router.set(odd, b)
        await router.until({odd: "refused", b: "serving"})
        await shards.shards[odd].drain()
        await router.until({odd: "joining", b: "serving"})  # it gives no answer any more


async def test_an_empty_answer_removes_no_shard_that_serves(tmp_path: Path) -> None:
    async with world(tmp_path) as shards:
        a, b = await shards.shard("a"), await shards.shard("b")
        router = await shards.cluster(a, b)
        await router.until({a: "serving", b: "serving"})
        listeners = [router.submit(200) for _ in range(4)]
        router.set()
        await until(router.changed.empty)
        assert router.cluster.ready
        await until(lambda: shards.engines[a].running == 2)
        shards.shards[a].end_session()
        await router.until({b: "serving"})
        for listener in listeners:
            await listener.over.wait()
        assert [len(listener.tokens) for listener in listeners] == [200] * 4


async def test_a_shard_that_another_router_drives_is_taken_once_that_lets_go(tmp_path: Path) -> None:
    async with world(tmp_path) as shards:
        a, b, c = [await shards.shard(name) for name in "abc"]
        first = await shards.cluster(a)
        second = await shards.cluster(b)
        second.set(a, b)
        await second.until({a: "taken", b: "serving"})
        running_there = first.submit(100)
        await until(lambda: shards.engines[a].running == 1)
        first.set(c)
        await second.until({a: "serving", b: "serving"})
        assert len(running_there.tokens) == 100
        assert first.states == {c: "serving"}


async def test_the_last_shard_is_given_up_only_for_another_one(tmp_path: Path) -> None:
    """Three routers change shards in a ring, beginning where one is free: each is ready at every moment."""
    async with world(tmp_path) as shards:
        a, b, c, spare = [await shards.shard(name) for name in ("a", "b", "c", "spare")]
        routers = [await shards.cluster(each) for each in (a, b, c)]
        for router, own in zip(routers, (a, b, c), strict=True):
            await router.until({own: "serving"})
        unready: list[int] = []

        async def watch() -> None:
            while True:
                unready.extend(number for number, router in enumerate(routers) if not router.cluster.ready)
                await asyncio.sleep(0)

        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(watch())
            routers[0].set(b)
            routers[1].set(c)
            await routers[0].until({a: "serving", b: "taken"})
            await routers[1].until({b: "serving", c: "taken"})
            routers[2].set(spare)
            for router, own in zip(routers, (b, c, spare), strict=True):
                await router.until({own: "serving"})
            watching.cancel()
        assert not unready
        routers[0].changed.put_nowait(frozenset())
        await routers[0].until({})
        assert not routers[0].cluster.ready, "a router without a share lets go"


async def test_a_shard_of_an_older_version_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One upgrade of a whole deployment replaces routers and shards at the same time."""
    monkeypatch.setattr(client, "OPENS_WITHIN_S", 0.2)
    async with world(tmp_path) as shards:
        router = await shards.cluster(older := await shards.shard("older", OlderServicer))
        await router.until({older: "serving"})
        listener = router.submit(20)
        await listener.over.wait()
        assert len(listener.tokens) == 20
