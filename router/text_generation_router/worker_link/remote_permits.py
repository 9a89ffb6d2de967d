"""RemotePermits: the limit of concurrent generations as an HTTP worker sees it. The scheduler process counts."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from text_generation_proto.worker_link import worker_link_pb2 as pb
from text_generation_router.errors import DeadlineExceeded
from text_generation_router.permits import no_deadline
from text_generation_router.request import DEFAULT_TENANT, TenantId
from text_generation_router.worker_link.convert import text_to_pb
from text_generation_router.worker_link.scheduler_link import SchedulerLink


class RemotePermits:
    """The permits of all workers together; a ConcurrencyLimit."""

    def __init__(self, limit: int, link: SchedulerLink) -> None:
        self.limit = limit
        self._link = link

    @asynccontextmanager
    async def take(
        self, count: int, tenant: TenantId = DEFAULT_TENANT, by: Callable[[], float | None] = no_deadline
    ) -> AsyncIterator[None]:
        """Hold `count` permits inside the block. Raises Overloaded, InvalidRequest, DeadlineExceeded, Unhealthy."""
        permits, deadline = pb.TakePermits(count=count, tenant=text_to_pb(tenant)), by()
        try:
            await self._take(permits, deadline)
            yield
        finally:  # also if the wait for them ended early: they may be taken by now
            self._link.held.pop(permits.number, None)
            self._link.send(pb.FromWorker(give_permits=pb.GivePermits(number=permits.number)))

    async def _take(self, permits: pb.TakePermits, deadline: float | None) -> None:
        def numbered(number: int) -> pb.FromWorker:
            permits.number = number
            return pb.FromWorker(take_permits=permits)

        try:
            async with asyncio.timeout_at(deadline):
                await self._link.request(numbered)
        except TimeoutError:
            raise DeadlineExceeded("its time was over before it was queued") from None
        self._link.held[permits.number] = permits
