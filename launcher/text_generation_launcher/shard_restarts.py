"""The replicas as units of restarts.

A replica is a group of shards, which is a single shard unless the model is split. A group that loses one shard ends as a
whole, is restarted, and counts one death.

A restarted shard that serves something else than before, because files of its model are gone or were replaced, cannot run
the requests of the others. It is stopped, and counts as one that died before it served.

The router is not notified: its stream breaks, and it connects to the same address again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import structlog

from text_generation_launcher.child import ChildLost, ShardsHopeless, run_to_end
from text_generation_launcher.plan import ShardSpec
from text_generation_launcher.restarts import RestartPolicy, Restarts, Unit, UnitExit
from text_generation_launcher.shard_group import RankExit, RunShard, run_group
from text_generation_launcher.shutdown import GracefulShutdown
from text_generation_proto.description import difference
from text_generation_proto.descriptors import DescriptorReserve
from text_generation_proto.exit_codes import ExitCode
from text_generation_proto.v1 import shard_pb2 as pb

log = structlog.get_logger()


class ReplicaUnit(Unit):
    """The shards of one replica."""

    def __init__(
        self,
        shards: Sequence[ShardSpec],
        stop: GracefulShutdown,
        reserve: DescriptorReserve,
        run_shard: RunShard = run_to_end,
        *,
        json_output: bool,
    ) -> None:
        """`shards` are ordered by rank."""
        addresses = {address for spec in shards for address in (spec.address, spec.group_address)}
        super().__init__("shard", {"replica": shards[0].replica}, addresses)
        self._shards = shards
        self._stop = stop
        self._reserve = reserve
        self._run_shard = run_shard
        self._json_output = json_output
        self._description: pb.InfoResponse | None = None
        """That of rank 0 when it served first."""

    async def run(self) -> UnitExit:
        """Run the shards once; return the exit that ended them."""
        described: list[asyncio.Future[pb.InfoResponse]] = [
            asyncio.get_running_loop().create_future() for _ in self._shards
        ]
        async with asyncio.TaskGroup() as tasks:
            watch = tasks.create_task(self._watch_start(described))
            group = tasks.create_task(
                run_group(
                    self._shards,
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
        cause = RankExit(0, ExitCode.FAILED) if group.cancelled() else group.result()
        name = next(shard.name for shard in self._shards if shard.rank == cause.rank)
        return UnitExit(name, cause.code, {"rank": cause.rank})

    async def _watch_start(self, described: Sequence[asyncio.Future[pb.InfoResponse]]) -> bool:
        """Wait until all shards serve; return False if they serve something else than before."""
        description, *_ = [await each for each in described]
        if self._description is None:
            self._description = description
        elif different := difference(description, self._description):
            log.error("shard serves something else than before its restart", **self.fields, reason=different)
            return False
        self.mark_serving()
        return True


def supervise_replicas(
    groups: Sequence[Sequence[ShardSpec]],
    stop: GracefulShutdown,
    policy: RestartPolicy,
    answers: Callable[[], bool],
    reserve: DescriptorReserve,
    run_shard: RunShard = run_to_end,
    *,
    json_output: bool,
) -> Restarts:
    """Return what keeps the replicas of a plan running. Its final errors are ShardsHopeless, or ChildLost without restarts."""
    units = [ReplicaUnit(group, stop, reserve, run_shard, json_output=json_output) for group in groups]

    def give_up(_child: str) -> Exception:
        if policy.max_restarts == 0:
            return ChildLost("no shard is left")
        log.error("giving up: no shard serves, and none is worth another restart", shards=len(units))
        return ShardsHopeless("no shard serves")

    return Restarts(units, policy, stop, answers, give_up)
