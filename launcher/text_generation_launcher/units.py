"""The units of restarts: replicas, and the processes of the router.

A replica is a group of shards, which is a single shard unless the model is split. Its shards start together, and all end when
one ends:

    one ends by itself ──► the others have FAREWELL seconds to notice and end ──► SIGTERM ──► BROKEN_GRACE ──► SIGKILL

The rest of a broken group may wait in a GPU collective for the dead rank forever, so it gets less time than a shard that is
stopped. The whole group is restarted, and counts one death.

A restarted shard that serves something else than before, because files of its model are gone or were replaced, cannot run
the requests of the others. It is stopped, and counts as one that died before it served.

The router is not notified: its stream breaks, and it connects to the same address again.

The router is one process, or the scheduler process and the HTTP workers. Each is restarted alone, and the shards keep their
weights. The processes find each other again by themselves.
"""

import asyncio
import signal
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager

from text_generation_common.descriptors import DescriptorReserve
from text_generation_common.exit_codes import ExitCode
from text_generation_common.log import log
from text_generation_launcher.child import run_to_end
from text_generation_launcher.plan import ChildSpec, ShardSpec
from text_generation_launcher.restarts import Unit, UnitExit
from text_generation_launcher.shutdown import GracefulShutdown, send
from text_generation_proto.description import difference
from text_generation_proto.v1 import shard_pb2 as pb

FAREWELL = 1.5
"""Seconds in which the other shards should notice that the group is broken. They then log the reason and exit."""
BROKEN_GRACE = 2.0
"""Seconds between SIGTERM and SIGKILL for shards that have not noticed."""

RunShard = Callable[..., Awaitable[int]]
"""Runs a shard to its end, as `child.run_to_end` does."""

Description = asyncio.Future[pb.InfoResponse]


class ReplicaUnit(Unit):
    def __init__(
        self,
        shards: Sequence[ShardSpec],
        stop: GracefulShutdown,
        reserve: DescriptorReserve,
        run_shard: RunShard = run_to_end,
    ) -> None:
        """`shards` are ordered by rank. `run_shard` runs one of them."""
        addresses = {address for spec in shards for address in (spec.address, spec.group_address)}
        super().__init__("shard", {"replica": shards[0].replica}, stop, reserve, addresses)
        self._shards = shards
        self._run_shard = run_shard
        self._description: pb.InfoResponse | None = None
        """That of the first shard when it served first."""

    async def run(self) -> UnitExit:
        """Run the shards until one ends by itself and all have ended; return the exit that ended them."""
        described: list[Description] = [asyncio.get_running_loop().create_future() for _ in self._shards]
        async with asyncio.TaskGroup() as tasks:
            watch = tasks.create_task(self._watch_start(described))
            group = tasks.create_task(self._run_group(described))
            await asyncio.wait((watch, group), return_when=asyncio.FIRST_COMPLETED)
            if not group.done() and not watch.result():
                group.cancel()
            await asyncio.wait((group,))
            watch.cancel()
        if group.cancelled():
            first = self._shards[0]
            return UnitExit(first.name, ExitCode.FAILED, {"rank": first.rank})
        return root_cause(group.result())

    async def _watch_start(self, described: Sequence[Description]) -> bool:
        """Wait until all shards serve; return False if they serve something else than before."""
        description, *_ = [await each for each in described]
        if self._description is None:
            self._description = description
        elif different := difference(description, self._description):
            log.error("shard serves something else than before its restart", **self.fields, reason=different)
            return False
        self.mark_serving()
        return True

    async def _run_group(self, described: Sequence[Description]) -> list[UnitExit]:
        """Run the shards; return their exits in order. `described` gets their descriptions. When cancelled, stop them first."""
        exits: list[UnitExit] = []
        broken = False
        hung = asyncio.Event()  # a rank that hangs may wait for another one: the stacks of all are needed

        def grace_period(seconds: float, terminate: Callable[[], None]) -> AbstractAsyncContextManager[None]:
            return self.stop.grace_period(min(seconds, BROKEN_GRACE) if broken else seconds, terminate)

        async def run(spec: ShardSpec, description: Description) -> None:
            running = self._run_shard(spec, grace_period, hung=hung, described=description, reserve=self.reserve)
            exits.append(await self.run_process(running, spec.name, rank=spec.rank))

        async with asyncio.TaskGroup() as tasks:
            members = [tasks.create_task(run(*each)) for each in zip(self._shards, described, strict=True)]
            await asyncio.wait(members, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait(members, timeout=FAREWELL)
            broken = True
            for member in members:
                member.cancel()
        return exits


def root_cause(exits: Sequence[UnitExit]) -> UnitExit:
    """Return the first exit that is not the consequence of another: a shard that loses a peer exits with BUG."""
    return next((exit_ for exit_ in exits if exit_.code != ExitCode.BUG), exits[0])


class RouterUnit(Unit):
    def __init__(self, spec: ChildSpec, stop: GracefulShutdown, reserve: DescriptorReserve) -> None:
        super().__init__("router", {"child": spec.name}, stop, reserve)
        self._spec = spec

    async def run(self) -> UnitExit:
        serves: asyncio.Future[pb.InfoResponse] = asyncio.get_running_loop().create_future()
        serves.add_done_callback(lambda _: self.mark_serving())
        running = run_to_end(
            self._spec,
            self.stop.grace_period,
            described=serves,
            reserve=self.reserve,
            beside=self._forward_hangups,
        )
        return await self.run_process(running, self._spec.name)

    async def _forward_hangups(self, process: asyncio.subprocess.Process) -> None:
        """Pass SIGHUP on. One that arrives while the process starts is passed on when it serves and has a handler."""
        hangup = self.stop.reload
        await self.serving.wait()
        while True:
            await hangup.wait()
            hangup = self.stop.reload
            send(process, signal.SIGHUP)
