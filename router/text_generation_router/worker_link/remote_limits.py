"""Limits as an HTTP worker sees them: of concurrent generations, and the rates of API keys. The scheduler process counts."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from text_generation_proto.worker_link import worker_link_pb2 as pb
from text_generation_router.errors import DeadlineExceeded, ServingError
from text_generation_router.permits import no_deadline
from text_generation_router.rate_limits import RateLimits, Rates
from text_generation_router.request import DEFAULT_TENANT, TenantId
from text_generation_router.worker_link.convert import text_to_pb
from text_generation_router.worker_link.rpc import Handlers
from text_generation_router.worker_link.scheduler_link import SchedulerLink

START_REQUEST, SPEND_TOKENS = "start request", "spend tokens"
"""Methods of the link."""


@dataclass(slots=True)
class RemotePermits:
    """The permits of all workers together; a ConcurrencyLimit."""

    limit: int
    link: SchedulerLink

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
            self.link.held.pop(permits.number, None)
            self.link.send(pb.FromWorker(give_permits=pb.GivePermits(number=permits.number)))

    async def _take(self, permits: pb.TakePermits, deadline: float | None) -> None:
        def numbered(number: int) -> pb.FromWorker:
            permits.number = number
            return pb.FromWorker(take_permits=permits)

        try:
            async with asyncio.timeout_at(deadline):
                await self.link.request(numbered)
        except TimeoutError:
            raise DeadlineExceeded("its time was over before it was queued") from None
        self.link.held[permits.number] = permits


@dataclass(slots=True)
class RemoteRates:
    """Asks the scheduler process; a RateCounter."""

    link: SchedulerLink
    _spending: set[asyncio.Task[None]] = field(default_factory=set)

    async def start_request(self, rates: Rates) -> None:
        """Count one request. Raises RateLimited, Unhealthy."""
        await self.link.call(START_REQUEST, rates)

    def spend_tokens(self, rates: Rates, tokens: int) -> None:
        if rates.tokens_per_minute is not None and tokens:
            task = asyncio.get_running_loop().create_task(self._spend(rates, tokens))
            self._spending.add(task)
            task.add_done_callback(self._spending.discard)

    async def _spend(self, rates: Rates, tokens: int) -> None:
        with suppress(ServingError):  # without a scheduler process there are no counts
            await self.link.call(SPEND_TOKENS, rates, tokens)


def rate_handlers(limits: RateLimits) -> Handlers:
    """Return the handlers of the scheduler process."""

    async def spend_tokens(rates: dict[str, Any], tokens: int) -> None:
        limits.spend_tokens(Rates(**rates), tokens)

    return {START_REQUEST: lambda rates: limits.start_request(Rates(**rates)), SPEND_TOKENS: spend_tokens}
