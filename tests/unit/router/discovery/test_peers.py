"""The shards of routers that share them, with peers over real HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

from aiohttp import web
from followed_source import Followed, followed
from http_stack import until

from text_generation_router.api.app import create_starting_app
from text_generation_router.discovery.peers import SharedShards
from text_generation_router.discovery.source import StaticSource

SHARDS = tuple(f"10.0.0.{number}:50051" for number in range(4))


@asynccontextmanager
async def answering(port: int = 0, reached: Callable[[], bool] = lambda: True) -> AsyncIterator[int]:
    """A router that is alive; yields its port."""
    runner = web.AppRunner(create_starting_app(reached), shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


@asynccontextmanager
async def driven(shared: SharedShards) -> AsyncIterator[Followed]:
    async with asyncio.TaskGroup() as tasks, followed(shared) as record:
        running = tasks.create_task(shared.run())
        yield record
        running.cancel()


async def test_routers_share_the_shards_and_take_over_those_of_one_that_does_not_answer() -> None:
    async with AsyncExitStack() as stack:
        first, other = await stack.enter_async_context(answering()), AsyncExitStack()
        second = await other.enter_async_context(answering())
        peers = StaticSource([f"127.0.0.1:{first}", f"127.0.0.1:{second}"])
        shares = [SharedShards(StaticSource(SHARDS), peers, port) for port in (first, second)]
        a, b = [await stack.enter_async_context(driven(shared)) for shared in shares]
        await until(lambda: bool(a.sets and b.sets) and len(a.sets[-1]) == len(b.sets[-1]) == 2)
        share = a.sets[-1]
        assert b.sets[-1] == frozenset(SHARDS) - share
        await other.aclose()
        await until(lambda: a.sets[-1] == frozenset(SHARDS))
        async with answering(second):
            await until(lambda: a.sets[-1] == share)


async def test_a_router_that_is_not_listed_counts_itself_in() -> None:
    async with (
        answering() as port,
        driven(SharedShards(StaticSource(SHARDS), StaticSource([f"127.0.0.1:{port}"]), port=1)) as record,
    ):
        await until(lambda: bool(record.sets) and len(record.sets[-1]) == 2)


async def test_a_router_that_reaches_no_shard_gets_none() -> None:
    """It has a wrong token or no DNS: the others keep all shards from the first moment on."""
    reached, asked = False, asyncio.Event()

    def reaches() -> bool:
        asked.set()
        return reached

    async with (
        answering() as mine,
        answering(reached=reaches) as port,
        driven(SharedShards(StaticSource(SHARDS), StaticSource([f"127.0.0.1:{port}"]), mine)) as record,
    ):
        for _ in range(2):
            asked.clear()
            await asked.wait()
        assert set(record.sets) == {frozenset(SHARDS)}
        reached = True
        await until(lambda: len(record.sets[-1]) == 2)
        reached = False
        await until(lambda: record.sets[-1] == frozenset(SHARDS))
