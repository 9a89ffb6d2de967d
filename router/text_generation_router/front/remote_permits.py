"""RemotePermits: the limit of concurrent generations as an HTTP worker sees it. The scheduler process counts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from text_generation_router.front.remote_cluster import RemoteCluster
from text_generation_router.permits import no_deadline
from text_generation_router.request import DEFAULT_TENANT, TenantId


class RemotePermits:
    """The permits of all workers together; a ConcurrencyLimit."""

    def __init__(self, limit: int, cluster: RemoteCluster) -> None:
        self.limit = limit
        self._cluster = cluster

    @asynccontextmanager
    async def take(
        self, count: int, tenant: TenantId = DEFAULT_TENANT, by: Callable[[], float | None] = no_deadline
    ) -> AsyncIterator[None]:
        """Hold `count` permits inside the block. Raises Overloaded, InvalidRequest, DeadlineExceeded, Unhealthy."""
        number = await self._cluster.hold_permits(count, tenant, by())
        try:
            yield
        finally:
            self._cluster.give_permits(number)
