"""The shards of routers that share them, with peers over real HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from aiohttp import web
from followed_source import Followed, followed
from http_stack import until

from text_generation_router.api.starting import create_starting_app
from text_generation_router.discovery.peers import SharedShards
from text_generation_router.discovery.static import StaticSource

SHARDS = tuple(f"10.0.0.{number}:50051" for number in range(4))


@asynccontextmanager
async def answering(port: int = 0) -> AsyncIterator[int]:
    """A router that is alive; yields its port."""
    runner = web.AppRunner(create_starting_app(), shutdown_timeout=0.1)
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
        await until(lambda: bool(a.sets and b.sets))
        share = a.sets[-1]
        assert (len(share), b.sets[-1]) == (2, frozenset(SHARDS) - share)
        await other.aclose()
        await until(lambda: a.sets[-1] == frozenset(SHARDS))
        async with answering(second):
            await until(lambda: a.sets[-1] == share)


async def test_a_router_that_is_not_listed_counts_itself_in() -> None:
    async with (
        answering() as port,
        driven(SharedShards(StaticSource(SHARDS), StaticSource([f"127.0.0.1:{port}"]), port=1)) as record,
    ):
        await until(lambda: bool(record.sets))
        assert len(record.sets[-1]) == 2
