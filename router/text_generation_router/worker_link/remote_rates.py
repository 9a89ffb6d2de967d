"""RemoteRates: the rate limits of API keys as an HTTP worker sees them. The scheduler process counts."""

import asyncio
from contextlib import suppress

import orjson

from text_generation_router.errors import ServingError
from text_generation_router.rate_limits import RateLimits, Rates
from text_generation_router.worker_link.rpc import Handlers
from text_generation_router.worker_link.scheduler_link import SchedulerLink

START_REQUEST, SPEND_TOKENS = "start request", "spend tokens"
"""Methods of the link."""


class RemoteRates:
    """Asks the scheduler process; a RateCounter."""

    def __init__(self, link: SchedulerLink) -> None:
        self._link = link
        self._spending: set[asyncio.Task[None]] = set()

    async def start_request(self, rates: Rates) -> None:
        """Count one request. Raises RateLimited, Unhealthy."""
        await self._link.call(START_REQUEST, _to_bytes(rates, 0))

    def spend_tokens(self, rates: Rates, tokens: int) -> None:
        if rates.tokens_per_minute is not None and tokens:
            task = asyncio.get_running_loop().create_task(self._spend(_to_bytes(rates, tokens)))
            self._spending.add(task)
            task.add_done_callback(self._spending.discard)

    async def _spend(self, body: bytes) -> None:
        with suppress(ServingError):  # without a scheduler process there are no counts
            await self._link.call(SPEND_TOKENS, body)


def rate_handlers(limits: RateLimits) -> Handlers:
    """Return the handlers of the scheduler process."""

    async def start_request(body: bytes) -> bytes:
        rates, _ = _from_bytes(body)
        await limits.start_request(rates)
        return b""

    async def spend_tokens(body: bytes) -> bytes:
        limits.spend_tokens(*_from_bytes(body))
        return b""

    return {START_REQUEST: start_request, SPEND_TOKENS: spend_tokens}


def _to_bytes(rates: Rates, tokens: int) -> bytes:
    return orjson.dumps([rates.key, rates.requests_per_minute, rates.tokens_per_minute, tokens])


def _from_bytes(body: bytes) -> tuple[Rates, int]:
    *rates, tokens = orjson.loads(body)
    return Rates(*rates), tokens
