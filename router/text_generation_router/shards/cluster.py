"""All replicas behind one scheduler: requests go in here, whichever replica they run on.

submit, cancel ──► Cluster ──► scheduler
                      ├── a task a replica: join, serve, and join again when its shard was lost
                      └── a task that ends requests whose time is over
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import grpc
import structlog

from text_generation_proto.client import ShardClient
from text_generation_router.errors import DeadlineExceeded, GenerationFailed, Overloaded, Unhealthy
from text_generation_router.request import Request, RequestId, TenantId, TokenListener
from text_generation_router.scheduling.scheduler import Scheduler
from text_generation_router.shards.join import CannotJoin, Joined, WarmUpLimits, join, together
from text_generation_router.shards.listeners import Listeners
from text_generation_router.shards.observer import StepObserver
from text_generation_router.shards.replica import Replica, ShardLost, Shared

RETURN_PATIENCE_S = 60.0
"""Seconds after the last replica was lost for which new requests wait for one rather than being refused."""
GONE_AFTER_S = 600.0
"""Seconds after the last replica was lost for which those that it left wait for one. A large model loads for minutes."""
FIRST_RETRY_S = 0.05
LONGEST_RETRY_S = 2.0
"""Seconds between two tries to join a shard that is gone; each wait is twice the last."""
LASTING_SESSION_S = 2.0
"""A session that ended sooner does not start the waits over."""
JOIN_TIMEOUT_S = 3600.0
"""Seconds in which a shard that comes back may load its model. Its launcher knows better whether it ever will."""
FORESEEN_TOO_LATE = 1.5
"""A request that would wait so many times longer than it may is refused at once."""

log = structlog.get_logger()


class Cluster:
    """The replicas, and who listens to which request."""

    def __init__(self, scheduler: Scheduler, observer: StepObserver) -> None:
        self.scheduler = scheduler
        self._listeners = Listeners(self._enough)
        shared = Shared(scheduler, self._listeners, observer, self.dispatch, self._on_opened)
        self._replicas = [Replica(number, shared) for number in range(len(scheduler.replicas))]
        self._deadlines = asyncio.Event()
        """There may be an earlier deadline than the one waited for."""
        self._joined = asyncio.Event()
        self._alone_since: float | None = None
        """When the last replica was lost; None while there are some."""
        self._closed = False

    # ------------------------------------------------------------------------------------------------- for the router

    def submit(self, request: Request, listener: TokenListener) -> None:
        """Queue `request`; `listener` hears of it until its end or `cancel`. One that is refused fails at once."""
        now = time.monotonic()
        if self._closed or not self._expects_replicas(now):
            listener.on_failure(Unhealthy("no shard serves now"))
        elif min(request.qos.queue_by or now + 1, request.qos.end_by or now + 1) <= now:
            listener.on_failure(DeadlineExceeded("its time was over before it was queued"))
        elif not self.scheduler.fits(len(request.prompt), request.max_new_tokens):
            listener.on_failure(GenerationFailed("the KV cache is too small for this request now"))
        elif (wait := self._wait_too_long(request, now)) is not None:
            listener.on_failure(Overloaded(retry_after_s=wait))
        else:
            self._listeners.add(request.id, listener)
            self.scheduler.submit(request, now)
            if request.qos.end_by is not None or request.qos.queue_by is not None:
                self._deadlines.set()
            self.dispatch()

    def cancel(self, request_id: RequestId) -> None:
        """Nobody waits for this request any more; idempotent, also after its end."""
        if self._listeners.remove(request_id):
            self._cancel(request_id, satisfied=False)

    def foreseen_wait(self, tenant: TenantId) -> float | None:
        """Seconds a request of `tenant` that came now would wait; None: nothing is known."""
        return self.scheduler.estimated_wait(tenant)

    def dispatch(self) -> None:
        """Give queued requests to replicas that have room, but for those whose time is over: these end."""
        now = time.monotonic()
        if (due := self.scheduler.next_expiry) is not None and due <= now:
            self._listeners.failures(self.scheduler.expire(now).failed)
            self._wake()
        for number in self.scheduler.dispatch():
            self._replicas[number].wake()

    @property
    def connected(self) -> bool:
        """Whether some replica serves."""
        return self.scheduler.is_serving

    async def opened(self) -> None:
        """Return once some replica serves."""
        await self._joined.wait()

    def give_up(self, reason: str) -> None:
        """Every request fails now."""
        self._closed = True
        self._listeners.fail_all(reason)

    def _expects_replicas(self, now: float) -> bool:
        return self.connected or (self._alone_since is not None and now < self._alone_since + RETURN_PATIENCE_S)

    def _wait_too_long(self, request: Request, now: float) -> float | None:
        """Seconds after which to come again, if `request` would wait too long or make others do so."""
        tenant, queue_by = request.qos.tenant, request.qos.queue_by
        overfull = self.scheduler.exceeds_queue_limit(request)
        if not overfull and queue_by is None:
            return None
        wait = self.scheduler.estimated_wait(tenant) or 0.0
        if overfull or (queue_by is not None and wait > FORESEEN_TOO_LATE * max(0.0, queue_by - now)):
            return wait
        return None

    def _enough(self, request_id: RequestId) -> None:
        """Its listener has what it wanted."""
        if self._listeners.remove(request_id):
            self._cancel(request_id, satisfied=True)

    def _cancel(self, request_id: RequestId, *, satisfied: bool) -> None:
        self.scheduler.cancel(request_id, satisfied=satisfied)
        self._wake()
        # Somebody may have waited for what was placed but never sent: no report tells of that.
        self.dispatch()

    def _wake(self) -> None:
        for number, replica in enumerate(self._replicas):
            if self.scheduler.may_have_orders(number):
                replica.wake()

    # ------------------------------------------------------------------------------------------------------- the loops

    async def run(self, addresses: Sequence[str], joined: Sequence[Joined | None], limits: WarmUpLimits) -> None:
        """Serve until cancelled; then every request that is left hears of it.

        addresses[i] is replica i's; joined[i] what it said when it was warmed up, None if it has yet to be.
        """
        like = together(joined)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._end_what_is_over())
                for number, address in enumerate(addresses):
                    tasks.create_task(self._keep(number, _Place(address, limits, like), joined[number]))
        finally:
            self._closed = True
            self._listeners.fail_all("the server was stopped")

    async def _keep(self, number: int, place: _Place, joined: Joined | None) -> None:
        """Have a replica serve, again and again."""
        retry = FIRST_RETRY_S
        while True:
            began = time.monotonic()
            try:
                async with ShardClient.connect(place.address) as client:
                    if joined is None:
                        joined = await place.rejoin(client)
                        log.info("shard joined again", replica=number)
                        began = time.monotonic()
                    await self._replicas[number].serve(client, joined)
            except ShardLost as error:
                log.error("shard lost", replica=number, reason=str(error))
            except (CannotJoin, TimeoutError, grpc.aio.AioRpcError) as error:
                log.error("shard cannot join", replica=number, reason=str(error))
            else:
                raise AssertionError("a session ends with its shard")
            lasted = joined is not None and time.monotonic() - began > LASTING_SESSION_S
            joined = None
            self._on_lost()
            await asyncio.sleep(retry)
            retry = FIRST_RETRY_S if lasted else min(2 * retry, LONGEST_RETRY_S)

    def _on_opened(self) -> None:
        self._alone_since = None
        self._joined.set()

    def _on_lost(self) -> None:
        if not self.connected and self._alone_since is None and self._joined.is_set():
            self._alone_since = time.monotonic()
            self._deadlines.set()

    async def _end_what_is_over(self) -> None:
        while True:
            due = self.scheduler.next_expiry
            if self._alone_since is not None:
                due = min(due or math.inf, self._alone_since + GONE_AFTER_S)
            self._deadlines.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(None if due is None else max(0.0, due - time.monotonic())):
                    await self._deadlines.wait()
                    continue
            self.dispatch()  # which ends what has expired
            if self._alone_since is not None and time.monotonic() >= self._alone_since + GONE_AFTER_S:
                self._alone_since = time.monotonic() - RETURN_PATIENCE_S
                self._fail_waiting()

    def _fail_waiting(self) -> None:
        for request_id in self.scheduler.requests:
            self.scheduler.cancel(request_id)
        self._listeners.fail_all("no shard came back")


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a replica's shard listens, and what it has to be."""

    address: str
    limits: WarmUpLimits
    like: Joined

    async def rejoin(self, client: ShardClient) -> Joined:
        """Wait for a shard that comes back. Raises CannotJoin, TimeoutError."""
        joined = await join(client, self.limits, self.address, JOIN_TIMEOUT_S)
        if difference := joined.differs_from(self.like):
            raise CannotJoin(f"the shard at {self.address} serves something else: {difference}")
        return joined
