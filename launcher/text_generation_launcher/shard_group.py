"""The shards of one replica: start them together, end all when one ends.

    one ends by itself ──► the others have FAREWELL seconds to notice and end ──► SIGTERM ──► BROKEN_GRACE ──► SIGKILL

The rest of a broken group may wait in a GPU collective for the dead rank for ever, so it gets less time than a shard
that is stopped. A replica with one shard is a group of one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

import structlog

from text_generation_launcher.child import run_to_end
from text_generation_launcher.plan import ShardSpec
from text_generation_launcher.shutdown import GracePeriod
from text_generation_proto.descriptors import DescriptorReserve
from text_generation_proto.exit_codes import ExitCode
from text_generation_proto.v1 import shard_pb2 as pb

FAREWELL = 1.5
"""Seconds in which the other shards should notice that the group is broken. They then log the reason and exit."""
BROKEN_GRACE = 2.0
"""Seconds between SIGTERM and SIGKILL for shards that have not noticed."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class RankExit:
    """The exit of one shard of a group."""

    rank: int
    code: int


class RunShard(Protocol):
    """Runs a shard to its end, as `child.run_to_end` does."""

    async def __call__(
        self,
        spec: ShardSpec,
        grace_period: GracePeriod,
        /,
        *,
        json_output: bool,
        hung: asyncio.Event,
        described: asyncio.Future[pb.InfoResponse],
        reserve: DescriptorReserve,
    ) -> int:
        """Return the exit code of the shard."""
        ...


async def run_group(
    specs: Sequence[ShardSpec],
    grace_period: GracePeriod,
    described: Sequence[asyncio.Future[pb.InfoResponse]],
    reserve: DescriptorReserve,
    run_shard: RunShard = run_to_end,
    *,
    json_output: bool,
) -> RankExit:
    """Run the shards until one ends by itself and all have ended; return the exit that broke the group.

    `described` gets the descriptions of the shards once they serve. `run_shard` runs one of them. When cancelled, stop them
    all first.
    """
    exits: list[RankExit] = []
    broken = False
    hung = asyncio.Event()  # a rank that hangs may wait for another one: the stacks of all are needed

    def group_grace_period(seconds: float, terminate: Callable[[], None]) -> AbstractAsyncContextManager[None]:
        return grace_period(min(seconds, BROKEN_GRACE) if broken else seconds, terminate)

    async def run(spec: ShardSpec, description: asyncio.Future[pb.InfoResponse]) -> None:
        try:
            code = await run_shard(
                spec,
                group_grace_period,
                json_output=json_output,
                hung=hung,
                described=description,
                reserve=reserve,
            )
        except OSError as error:  # no memory or file descriptors for another process, perhaps only now
            log.error("shard cannot be started", replica=spec.replica, rank=spec.rank, reason=str(error))
            code = ExitCode.FAILED
        exits.append(RankExit(spec.rank, code))

    async with asyncio.TaskGroup() as tasks:
        members = [tasks.create_task(run(*each)) for each in zip(specs, described, strict=True)]
        await asyncio.wait(members, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait(members, timeout=FAREWELL)
        broken = True
        for member in members:
            member.cancel()
    return root_cause(exits)


def root_cause(exits: Sequence[RankExit]) -> RankExit:
    """Return the first exit that is not the consequence of another: a shard that loses a peer exits with BUG."""
    return next((exit_ for exit_ in exits if exit_.code != ExitCode.BUG), exits[0])
