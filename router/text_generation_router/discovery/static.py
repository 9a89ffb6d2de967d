"""A fixed list of members."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable

from text_generation_router.discovery.source import Address


class StaticSource:
    """Yields the same members once."""

    def __init__(self, addresses: Iterable[Address]) -> None:
        self._addresses = frozenset(addresses)

    async def members(self) -> AsyncIterator[frozenset[Address]]:
        yield self._addresses
        await asyncio.Event().wait()
