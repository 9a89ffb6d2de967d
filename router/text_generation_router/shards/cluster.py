"""Cluster: all replicas behind one scheduler.

submit, cancel ──► Cluster ──► scheduler
                      ├── one task per member: join, serve, rejoin when the shard was lost, leave (member.py)
                      └── one task that ends expired requests
"""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Generic, Literal, cast

from text_generation_common.heartbeat import HANG_TIMEOUT_S
from text_generation_common.log import log
from text_generation_common.shard_access import ShardAccess
from text_generation_common.waiting import holds_for
from text_generation_proto.values import WarmUpLimits
from text_generation_router.errors import DeadlineExceeded, GenerationFailed, ModelNotFound, Overloaded, Unhealthy
from text_generation_router.request import Request, RequestId, RequestProgress
from text_generation_router.scheduling.scheduler import Scheduler, SchedulerStats
from text_generation_router.shards.adapters import ReplicaAdapters
from text_generation_router.shards.join import ReplicaInfo, merge_capabilities
from text_generation_router.shards.listeners import Delivery, Listeners, Receiver
from text_generation_router.shards.member import ShardMember, ShardState, ShardTerms
from text_generation_router.shards.observer import StepObserver
from text_generation_router.shards.replica import ClusterContext

ACCEPT_WITHOUT_REPLICA_S = 60.0
"""Seconds after the loss of the last replica for which new requests are still queued."""
KEEP_WITHOUT_REPLICA_S = 600.0
"""Seconds after the loss of the last replica for which queued requests are kept. A large model loads for minutes."""
ABANDONED_AFTER_S = 1.0
"""Seconds without a shard, all having been told to stop, after which a router that stops gives its requests up."""
WAIT_TOLERANCE = 1.5
"""A request is refused if its estimated wait is this many times the time left in the queue."""


@dataclass(frozen=True, slots=True)
class MemberInfo:
    replica: int
    address: str
    state: Literal["joining", "serving", "hung", "draining", "taken", "refused"]
    reason: str


@dataclass(frozen=True, slots=True)
class ClusterInfo:
    """The state of all replicas at one moment, for /info: the statistics of the scheduler, and the shards."""

    stats: SchedulerStats
    members: Sequence[MemberInfo]
    isolated: Sequence[str] = ()
    """Features that are not used any more after audits."""


class Cluster(Generic[Receiver]):
    """The replicas, and the receivers of their requests: listeners in this process, or connections of HTTP workers.

    With listeners it is a ClusterInterface, which says more of its methods.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        observer: StepObserver,
        hang_timeout_s: float = HANG_TIMEOUT_S,
        delivery: Delivery[Receiver] | None = None,
    ) -> None:
        """Without `delivery` the receivers are TokenListeners."""
        self.scheduler = scheduler
        self.stopping = self.draining = False
        self.ids: Iterator[RequestId] = map(RequestId, count(1))
        self.on_submit: Callable[[Request], Request] = lambda request: request
        """Returns a request that is about to be queued, perhaps with other settings."""
        self.isolated: list[str] = []
        """Features, and replicas, that are not used any more after audits."""
        listeners = cast("Delivery[Receiver]", Listeners(partial(self.cancel, satisfied=True)))
        self._listeners = listeners if delivery is None else delivery
        self._adapters = ReplicaAdapters(
            scheduler,
            lambda number: number in self._by_number and self._by_number[number].connection.is_silent,
        )
        self._context = ClusterContext(
            scheduler,
            self._adapters,
            self._listeners,
            observer,
            self.dispatch,
            self._set_ranks,
            self._on_opened,
            hang_timeout_s,
        )
        self._members: dict[str, ShardMember] = {}
        """By address."""
        self._by_number: dict[int, ShardMember] = {}
        """By the scheduler's number of each of its ranks."""
        self._wanted: frozenset[str] | None = None
        """The addresses of the shards that are to be driven; None if none is known."""
        self._reconcile: Callable[[], None]
        """Starts and stops members so that they become the wanted ones; set by `run`."""
        self._deadlines = asyncio.Event()
        """Set when there may be an earlier deadline than the one waited for."""
        self._opened = asyncio.Event()
        self._settled = asyncio.Event()
        self._without_replica_since: float | None = None
        """Time at which the last replica was lost; None while one serves."""
        self._closed = False

    def submit(self, request: Request, listener: Receiver, progress: RequestProgress | None = None) -> None:
        """Queue `request`; `listener` gets its tokens until its end or `cancel`. One with `progress` waits for shards.

        Raises Unhealthy, DeadlineExceeded, GenerationFailed or Overloaded if it cannot be queued.
        """
        now = time.monotonic()
        if progress is None:
            self._check_new(request, now)
        elif self._closed:
            raise Unhealthy("no shard serves now")
        elif not self.connected and self._without_replica_since is None:
            self._without_replica_since = now
        scored, request = request.logprobs.tokens, self.on_submit(request)
        self._listeners.add(request.id, listener, scored=scored)
        self._listeners.failures(self.scheduler.submit(request, now, progress).failed)
        if request.qos.end_by is not None or request.qos.queue_by is not None or not self.connected:
            self._deadlines.set()
        self.dispatch()

    def _check_new(self, request: Request, now: float) -> None:
        """Raise a ServingError if a new request cannot be queued."""
        qos = request.qos
        if self._closed or not self._expects_replicas(now):
            raise Unhealthy("no shard serves now")
        if any(by is not None and by <= now for by in (qos.queue_by, qos.end_by)):
            self.scheduler.expired += 1
            raise DeadlineExceeded("its time was over before it was queued")
        if request.adapter and request.adapter not in self.adapters:
            raise ModelNotFound(f"The adapter `{request.adapter}` does not exist")
        if not self.scheduler.capacity.fits(len(request.prompt), request.max_new_tokens, request.adapter):
            raise GenerationFailed("no replica can hold this request now")
        self._refuse_overload(request, now)

    def cancel(self, request_id: RequestId, *, satisfied: bool = False) -> None:
        """Cancel a request; no-op if it is unknown or ended. `satisfied`: its listener wants no more tokens."""
        if self._listeners.remove(request_id):
            self.scheduler.cancel(request_id, satisfied=satisfied)
            self._wake()
            # A request that was placed but not sent leaves room at once, and no report follows.
            self.dispatch()

    def wake(self, replica: int) -> None:
        """Send the orders of a replica that has some."""
        self._by_number[replica].connection.wake()

    def release_replica(self, replica: int) -> bool:
        """Give a replica no new requests any more; return False if it is the last one."""
        if all(each.replica == replica for each in self.scheduler.available) or replica not in self._by_number:
            return False
        self._by_number[replica].connection.want(wanted=False)
        return True

    def _take_back(self) -> None:
        """Use released replicas again, because no other one is left."""
        for name in [each for each in self.isolated if each.startswith("replica ")]:
            if (member := self._by_number.get(int(name.removeprefix("replica ")))) is not None and member.wanted:
                log.warning("isolated replica is used again: no other one serves", replica=member.number)
                self.isolated.remove(name)
                member.connection.want(wanted=True)

    def dispatch(self) -> None:
        """End expired requests, and place queued ones on replicas with room."""
        now = time.monotonic()
        if (due := self.scheduler.next_expiry) is not None and due <= now:
            self._listeners.failures(self.scheduler.expire(now).failed)
            self._wake()
        for number in self.scheduler.dispatch():
            self._by_number[number].connection.wake()

    @property
    def adapters(self) -> Collection[str]:
        return self._adapters.names

    async def set_adapter(self, name: str, path: str | None) -> None:
        await self._adapters.change(name, path)

    @property
    def connected(self) -> bool:
        """True if a replica has a session; it may hang."""
        return bool(self.scheduler.serving)

    @property
    def ready(self) -> bool:
        """True if a replica gets new requests now, and is to stay, at least until another one has joined."""
        available = self.scheduler.available
        stays = any(self._by_number[each.replica].wanted for each in available)
        return stays or (bool(available) and self._awaits_shard())

    @property
    def live_requests(self) -> int:
        return len(self.scheduler.requests)

    @property
    def status(self) -> str:
        if serving := len(self.scheduler.serving):
            return f"serving with {serving} of {len(self.scheduler.replicas)} replicas"
        return f"standby: drives none of {len(self._members)} shards"

    async def info(self) -> ClusterInfo:
        members = (MemberInfo(each.number, each.address, each.state.value, each.reason) for each in self.members)
        return ClusterInfo(self.scheduler.stats(), list(members), list(self.isolated))

    @property
    def members(self) -> Collection[ShardMember]:
        """The shards that are members, and those that leave."""
        return self._members.values()

    def _awaits_shard(self) -> bool:
        """Return True if a shard is to be driven and may yet join."""
        coming = (ShardState.JOINING, ShardState.TAKEN)
        return any(member.wanted and member.state in coming for member in self._members.values())

    async def opened(self) -> None:
        """Wait for the first session."""
        await self._opened.wait()

    async def settled(self) -> None:
        """Wait for the first session, or until other routers are found to drive all shards."""
        await self._settled.wait()

    @property
    def shards_stopped(self) -> bool:
        """True if all shards have been told to stop."""
        return all(member.connection.stopped for member in self._members.values())

    async def abandoned(self) -> None:
        """Wait until all shards have been told to stop and none has come back for ABANDONED_AFTER_S."""
        await holds_for(ABANDONED_AFTER_S, lambda: self.shards_stopped)

    def give_up(self, reason: str) -> None:
        self._closed = True
        self._listeners.end_all(GenerationFailed(reason))

    def _expects_replicas(self, now: float) -> bool:
        lost_at = self._without_replica_since
        return self.connected or (lost_at is not None and now < lost_at + ACCEPT_WITHOUT_REPLICA_S)

    def _refuse_overload(self, request: Request, now: float) -> None:
        """Raise Overloaded if `request` would wait too long or exceed the limit of the queue."""
        tenant, queue_by = request.qos.tenant, request.qos.queue_by
        exceeds = self.scheduler.exceeds_queue_limit(request)
        if not exceeds and queue_by is None:
            return
        wait_s = self.scheduler.estimated_wait(tenant) or 0.0
        if exceeds or (queue_by is not None and wait_s > WAIT_TOLERANCE * max(0.0, queue_by - now)):
            raise Overloaded(retry_after_s=wait_s)

    def _wake(self) -> None:
        for number, member in self._by_number.items():
            if self.scheduler.may_have_orders(number):
                member.connection.wake()

    async def run(
        self,
        members: AsyncIterator[frozenset[str] | None],
        joined: Mapping[str, ReplicaInfo | None],
        limits: WarmUpLimits,
        access: ShardAccess | None = None,
    ) -> None:
        """Serve until cancelled, then end all requests with an error.

        `members` are the addresses of the shards, all of them each time; None if none is known: those that serve stay.
        `joined` are shards that have joined already, and in that order replicas are numbered. None has not joined, and at
        least one has. Without `access` the token is that of the environment.
        """
        terms = ShardTerms(limits, merge_capabilities(joined.values()), access)
        infos = dict(joined)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._expire_requests())
                tasks.create_task(self._adapters.run())

                def reconcile() -> None:
                    known = self._wanted
                    missing = set() if known is None else known - self._members.keys()
                    for address in [*(each for each in joined if each in missing), *sorted(missing - joined.keys())]:
                        member = ShardMember(
                            self.scheduler.add(), address, terms, self._context, self._on_lost, self._awaits_shard
                        )
                        self._members[address] = self._by_number[member.number] = member
                        tasks.create_task(self._hold(member, infos.pop(address, None)))
                    for address, member in self._members.items():
                        member.want(wanted=member.connected if known is None else address in known)

                self._reconcile = reconcile
                async for self._wanted in members:
                    reconcile()
        finally:
            self._closed = True
            self._listeners.end_all(GenerationFailed("the server was stopped"))

    async def _hold(self, member: ShardMember, info: ReplicaInfo | None) -> None:
        """Run a member, and forget it once its shard has left."""
        await member.run(info)
        log.info("shard left", replica=member.number, address=member.address)
        del self._members[member.address]
        self._set_ranks(member.number, 0)
        self.dispatch()
        self._reconcile()  # it may be a member again

    def _set_ranks(self, number: int, count: int) -> None:
        """Let the scheduler know so many ranks of a member, none of which serves."""
        member = self._by_number[number]
        ranks = member.connection.ranks
        while len(ranks) < count:
            ranks.append(self.scheduler.add())
            self._by_number[ranks[-1]] = member
        while len(ranks) > count:
            del self._by_number[ranks[-1]]
            self._listeners.failures(self.scheduler.remove(ranks.pop()).failed)

    def _on_opened(self) -> None:
        self._without_replica_since = None
        self._opened.set()
        self._settled.set()

    def _on_lost(self) -> None:
        self._reconcile()  # without known members, it is one no more
        if all(member.state is ShardState.TAKEN for member in self._members.values()):
            self._settled.set()
        if self.connected and not self.scheduler.available:
            self._take_back()
        if not self.connected and self._without_replica_since is None and self._opened.is_set():
            self._without_replica_since = time.monotonic()
            self._deadlines.set()

    async def _expire_requests(self) -> None:
        """End requests at their deadlines, and all requests if no replica returns in time."""
        while True:
            due = self.scheduler.next_expiry
            if self._without_replica_since is not None:
                due = min(due or math.inf, self._without_replica_since + KEEP_WITHOUT_REPLICA_S)
            self._deadlines.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(None if due is None else max(0.0, due - time.monotonic())):
                    await self._deadlines.wait()
                    continue
            self.dispatch()  # expires requests, too
            lost_at = self._without_replica_since
            if lost_at is not None and time.monotonic() >= lost_at + KEEP_WITHOUT_REPLICA_S:
                self._without_replica_since = time.monotonic() - ACCEPT_WITHOUT_REPLICA_S
                for request_id in tuple(self.scheduler.requests):
                    self.scheduler.cancel(request_id)
                self._listeners.end_all(GenerationFailed("no shard came back"))
