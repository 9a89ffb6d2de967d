"""Restart shards that die, and give up when restarts are hopeless.

One task per replica runs its group of shards, which is a single shard unless the model is split. A group that loses one
shard ends as a whole, is restarted, and counts one death.

    start ──► load ──► serve ──┐
      ▲         │              │ ends by itself
      │         ▼              ▼
      └─ delay ◄──── dead: sockets removed, failure streak updated
                       │
                       ▼ no replica serves and none has a restart left
                     ShardsHopeless, or ChildLost if restarts are disabled

The first restart comes almost at once, because most deaths are accidents. Further ones wait longer, so that a shard that
cannot live does not keep the machine busy. After `max_restarts` restarts in a row another one is unlikely to help. It is
still tried, at the longest delay, while another replica serves.

A restarted shard that serves something else than before, because files of its model are gone or were replaced, cannot run
the requests of the others. It is stopped, and counts as one that died before it served.

The router is not notified: its stream breaks, and it connects to the same address again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from text_generation_launcher.child import ChildFailed, ChildLost, ShardsHopeless, run_to_end
from text_generation_launcher.plan import ShardSpec
from text_generation_launcher.shard_group import RankExit, RunShard, run_group
from text_generation_launcher.shutdown import GracefulShutdown
from text_generation_proto.description import difference
from text_generation_proto.descriptors import DescriptorReserve
from text_generation_proto.exit_codes import ExitCode, exit_fields
from text_generation_proto.sockets import remove_socket, socket_path
from text_generation_proto.v1 import shard_pb2 as pb

DELAYS = (0.1, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
"""Seconds from the first, second, … death in a row to the restart; the last value is used for all further ones."""
STABLE_AFTER = 2.0
"""Seconds of serving after which a death starts a new streak: the start was not at fault. The router handles requests
that kill the shards which serve them: it fails a request that loses several replicas in a row."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class FailureStreak:
    """The deaths of a replica without STABLE_AFTER seconds of serving in between."""

    deaths: int = 0
    usage_error: bool = False
    """True if the last exit code was USAGE: a restart cannot change the settings."""


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Number and delays of restarts. Pure."""

    max_restarts: int = 5
    """In a row; 0: never restart."""
    delays: tuple[float, ...] = DELAYS
    stable_after: float = STABLE_AFTER

    def after_death(self, streak: FailureStreak, served: float, exit_code: int) -> FailureStreak:
        """Return the streak after a death with this exit code that followed `served` seconds of serving (0: none)."""
        deaths = 1 if served >= self.stable_after else streak.deaths + 1
        return FailureStreak(deaths, usage_error=exit_code == ExitCode.USAGE)

    def delay(self, streak: FailureStreak) -> float | None:
        """Return the seconds from the last death to the next start; None: never."""
        if self.max_restarts == 0:
            return None
        if self.hopeless(streak):
            return self.delays[-1]
        return self.delays[min(streak.deaths, len(self.delays)) - 1]

    def hopeless(self, streak: FailureStreak) -> bool:
        """Return True if no restarts are left in this streak."""
        return streak.usage_error or streak.deaths > self.max_restarts


class _Replica:
    """The shards of one replica and the history of their deaths."""

    def __init__(self, shards: Sequence[ShardSpec]) -> None:
        self.shards = shards
        """By rank."""
        self.number = shards[0].replica
        self.streak = FailureStreak()
        self.died_at: float | None = None
        self.serving = asyncio.Event()
        self.serving_since = 0.0
        self.description: pb.InfoResponse | None = None
        """That of rank 0 when it served first."""

    def mark_serving(self) -> None:
        self.serving.set()
        self.serving_since = time.monotonic()

    def mark_dead(self) -> float:
        """Remove the sockets, which a killed shard could not do; return the seconds it served, 0 if it never did."""
        now = time.monotonic()
        served = now - self.serving_since if self.serving.is_set() else 0.0
        self.serving.clear()
        self.died_at = now
        for address in {address for spec in self.shards for address in (spec.address, spec.group_address)}:
            if path := socket_path(address):
                remove_socket(path)
        return served


class ReplicaSupervisor:
    """Runs the replicas of a plan, one task each."""

    def __init__(
        self,
        groups: Sequence[Sequence[ShardSpec]],
        stop: GracefulShutdown,
        policy: RestartPolicy,
        ready: asyncio.Event,
        reserve: DescriptorReserve,
        run_shard: RunShard = run_to_end,
        *,
        json_output: bool,
    ) -> None:
        """`ready` is set once the router answers too: a death before that is a failure to start."""
        self._replicas = tuple(_Replica(group) for group in groups)
        self._stop = stop
        self._policy = policy
        self._ready = ready
        self._reserve = reserve
        self._run_shard = run_shard
        self._json_output = json_output

    def start(self, tasks: asyncio.TaskGroup) -> None:
        """Start all replicas. Their tasks raise ChildFailed, ChildLost or ShardsHopeless; cancelled, they stop the shards."""
        for replica in self._replicas:
            tasks.create_task(self._keep_running(replica))

    @property
    def serving(self) -> int:
        """The number of replicas that serve."""
        return sum(replica.serving.is_set() for replica in self._replicas)

    async def wait_until_serving(self) -> None:
        """Return once each replica has started to serve."""
        for replica in self._replicas:
            await replica.serving.wait()

    async def _keep_running(self, replica: _Replica) -> None:
        while True:
            cause, served = await self._run(replica)
            fields = {"replica": replica.number, "rank": cause.rank} | exit_fields(cause.code)
            if not self._ready.is_set():
                log.error("shard failed to start", **fields)
                raise ChildFailed(next(shard.name for shard in replica.shards if shard.rank == cause.rank))
            replica.streak = self._policy.after_death(replica.streak, served, cause.code)
            hopeless = self._all_hopeless()
            delay = None if hopeless else self._policy.delay(replica.streak)
            log.error("shard died", **fields, restart_in_s=delay)
            if hopeless:
                raise self._give_up()
            if delay is None:
                return
            await asyncio.sleep(delay)

    async def _run(self, replica: _Replica) -> tuple[RankExit, float]:
        """Run the shards of a replica once; return the exit that ended them and the seconds they served."""
        described: list[asyncio.Future[pb.InfoResponse]] = [
            asyncio.get_running_loop().create_future() for _ in replica.shards
        ]
        try:
            async with asyncio.TaskGroup() as tasks:
                watch = tasks.create_task(self._watch_start(replica, described))
                group = tasks.create_task(
                    run_group(
                        replica.shards,
                        self._stop.grace_period,
                        described,
                        self._reserve,
                        self._run_shard,
                        json_output=self._json_output,
                    )
                )
                await asyncio.wait((watch, group), return_when=asyncio.FIRST_COMPLETED)
                if not group.done() and not watch.result():
                    group.cancel()
                await asyncio.wait((group,))
                watch.cancel()
        finally:
            served = replica.mark_dead()
        return RankExit(0, ExitCode.FAILED) if group.cancelled() else group.result(), served

    async def _watch_start(self, replica: _Replica, described: Sequence[asyncio.Future[pb.InfoResponse]]) -> bool:
        """Wait until all shards of the replica serve; return False if they serve something else than before."""
        description, *_ = [await each for each in described]
        if replica.description is None:
            replica.description = description
        elif different := difference(description, replica.description):
            log.error("shard serves something else than before its restart", replica=replica.number, reason=different)
            return False
        replica.mark_serving()
        if replica.died_at is not None:
            seconds = round(replica.serving_since - replica.died_at, 2)
            log.info("shard serves again", replica=replica.number, seconds=seconds)
        return True

    def _all_hopeless(self) -> bool:
        """Return True if no replica serves and none has a restart left. A loading one counts as not serving."""
        return all(not replica.serving.is_set() and self._policy.hopeless(replica.streak) for replica in self._replicas)

    def _give_up(self) -> Exception:
        self._stop.shards_lost()
        if self._policy.max_restarts == 0:
            return ChildLost("no shard is left")
        log.error("giving up: no shard serves, and none is worth another restart", shards=len(self._replicas))
        return ShardsHopeless("no shard serves")
