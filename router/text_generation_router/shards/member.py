"""ShardMember: the shard at one address, from the moment that a source lists it until it has left.

             hung
              ▲▼
joining ──► serving ──► draining ──► (left)
   ▲  ╲        │
   │   ╲       └─ lost: joining again
   └─── taken (another router drives it), refused (it serves something else): tried again
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

import grpc

from text_generation_common.log import log
from text_generation_common.shard_access import ShardAccess
from text_generation_proto.client import ShardClient
from text_generation_proto.values import WarmUpLimits
from text_generation_router.shards.join import CannotJoin, ReplicaInfo, ShardTaken, join
from text_generation_router.shards.replica import ClusterContext, ReplicaConnection, ShardLost, ShardStopped

MIN_RETRY_S, MAX_RETRY_S = 0.05, 2.0
"""Wait between two attempts to join a lost shard; it doubles each time."""
RETRY_TAKEN_S = 1.0
"""Wait between two attempts to take a shard that another router drives."""
LASTING_SESSION_S = 2.0
"""A session of this length resets that wait."""
JOIN_TIMEOUT_S = 3600.0
"""Time for a restarted shard to load its model. Its launcher decides when to give up."""
ANSWER_S = 1.0
"""Time of a shard that was refused or taken to answer the next attempt."""
LEAVE_S = 30.0
"""Time of a shard that leaves to finish its sequences; those that are left move to other replicas, if there are any."""
LEAVE_CHECK_S = 0.02
"""Time between two looks at a shard that leaves."""


class ShardState(Enum):
    """The state of a member, as metrics and /info show it."""

    JOINING = "joining"
    SERVING = "serving"
    HUNG = "hung"
    """It does not answer, or owes a report: it gets no new requests until it answers, or is lost."""
    DRAINING = "draining"
    TAKEN = "taken"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class ShardTerms:
    """The conditions under which shards join."""

    limits: WarmUpLimits
    expected: ReplicaInfo
    access: ShardAccess | None


@dataclass(slots=True, eq=False)
class ShardMember:
    """One shard. Its replica has the same number all the time."""

    number: int
    address: str
    terms: ShardTerms
    context: ClusterContext
    on_lost: Callable[[], None]
    awaits_shard: Callable[[], bool]
    """Returns True while another shard is to join the cluster."""
    reason: str = ""
    """The last reason why it could not join."""
    losses: int = 0
    """Sessions that ended."""
    loss: ShardLost | None = None
    """The end of the last one."""
    connection: ReplicaConnection = field(init=False)
    _state: ShardState = ShardState.JOINING
    _unwanted: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.connection = ReplicaConnection(self.number, self.context)

    @property
    def wanted(self) -> bool:
        """False while it leaves."""
        return not self._unwanted.is_set()

    @property
    def connected(self) -> bool:
        """True while it has a session."""
        return self.context.scheduler.replicas[self.number] is not None

    @property
    def state(self) -> ShardState:
        if not self.connected:
            return self._state
        if self.connection.hangs:
            return ShardState.HUNG
        return ShardState.DRAINING if self.number in self.context.scheduler.draining else ShardState.SERVING

    def want(self, *, wanted: bool) -> None:
        """Keep the shard, or let it leave: it finishes its sequences first."""
        if wanted != self.wanted:
            log.info("shard assigned" if wanted else "shard unassigned", replica=self.number, address=self.address)
            (self._unwanted.clear if wanted else self._unwanted.set)()
            if wanted:
                self.connection.want(wanted=True)

    async def run(self, info: ReplicaInfo | None) -> None:
        """Serve until it has left. `info` is its description if it has joined already."""
        async with asyncio.TaskGroup() as tasks:
            keeping = tasks.create_task(self._keep(info))
            await self._left()
            keeping.cancel()

    async def _left(self) -> None:
        """Wait until the shard is not wanted and its sequences have ended, or can go on elsewhere and were given LEAVE_S.

        The last replica goes on, also with new requests, until another one has joined. If none is to join, it goes on until there
        are no requests.
        """
        scheduler = self.context.scheduler
        while True:
            await self._unwanted.wait()
            end = time.monotonic() + LEAVE_S
            while not self.wanted and self.connected:
                others = any(each.replica not in self.connection.ranks for each in scheduler.available)
                if others:
                    self.connection.want(wanted=False)
                if not (not self.connection.is_empty if others else scheduler.requests or self.awaits_shard()):
                    break
                if others and time.monotonic() >= end:
                    break
                await asyncio.sleep(LEAVE_CHECK_S)
            if not self.wanted:
                return

    async def _keep(self, info: ReplicaInfo | None) -> None:
        """Run session after session."""
        terms, retry_s = self.terms, MIN_RETRY_S
        again = False
        while True:
            began = time.monotonic()
            lasted = False
            try:
                async with ShardClient.connect(self.address, terms.access) as client:
                    if info is None:
                        info = await self._join(client)
                        began = time.monotonic()
                    await self.connection.serve(client, info, again=again)
            except ShardLost as error:
                if isinstance(error, ShardStopped):
                    log.info("shard stopped", replica=self.number, reason=str(error))
                else:
                    log.error("shard lost", replica=self.number, reason=str(error))
                self._set(ShardState.JOINING, "")
                self.losses, self.loss = self.losses + 1, error
                lasted = time.monotonic() - began > LASTING_SESSION_S
            except ShardTaken as error:
                if self._state is not ShardState.TAKEN:
                    log.info("shard is taken", replica=self.number, address=self.address, reason=str(error))
                self._set(ShardState.TAKEN, str(error))
                retry_s = RETRY_TAKEN_S
            except CannotJoin as error:
                self._refused(str(error))
            except (OSError, grpc.aio.AioRpcError) as error:
                self._refused(f"{type(error).__name__}: {error}")
            else:
                raise AssertionError("a session ends with its shard")
            info, again = None, True
            self.on_lost()
            await asyncio.sleep(retry_s)
            retry_s = MIN_RETRY_S if lasted or retry_s == RETRY_TAKEN_S else min(2 * retry_s, MAX_RETRY_S)

    async def _join(self, client: ShardClient) -> ReplicaInfo:
        """Wait for the shard and warm it up. One that gives no answer is no longer refused or taken, it may have died."""
        silent = asyncio.get_running_loop().call_later(ANSWER_S, self._set, ShardState.JOINING, "")
        try:
            return await join(client, self.terms.limits, self.address, JOIN_TIMEOUT_S, self.terms.expected)
        finally:
            silent.cancel()

    def _refused(self, reason: str) -> None:
        if self.reason != reason:
            log.error("shard cannot join", replica=self.number, address=self.address, reason=reason)
        self._set(ShardState.REFUSED, reason)

    def _set(self, state: ShardState, reason: str) -> None:
        self._state, self.reason = state, reason
