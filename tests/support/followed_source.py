"""A source of members that is read to its last set."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

from text_generation_router.discovery.peers import SharedShards
from text_generation_router.discovery.source import Source


class Followed:
    """The members that a source has yielded."""

    def __init__(self) -> None:
        self.sets: list[frozenset[str]] = []
        self.changed = asyncio.Event()

    async def until(self, *expected: str, seconds: float = 10) -> None:
        async with asyncio.timeout(seconds):
            while not self.sets or self.sets[-1] != frozenset(expected):
                self.changed.clear()
                await self.changed.wait()


@asynccontextmanager
async def followed(source: Source | SharedShards) -> AsyncIterator[Followed]:
    record = Followed()

    async def follow() -> None:
        async with aclosing(source.members()) as members:  # type: ignore[type-var]
            async for each in members:
                record.sets.append(each or frozenset())
                record.changed.set()

    async with asyncio.TaskGroup() as tasks:
        following = tasks.create_task(follow())
        yield record
        following.cancel()
