"""Shards that come and go under a running cluster, over real gRPC: join, leave, refused, taken."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from http_stack import until
from served_cluster import world

from text_generation_proto import client
from text_generation_router.shards import member
from text_generation_shard.servicer import RunContext, ShardServicer


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
