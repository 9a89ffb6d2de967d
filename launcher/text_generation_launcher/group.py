"""The processes of one replica, run as one: when one ends, the others are ended.

    one ends by itself ──► the others have FAREWELL seconds to see it and end, too ──► SIGTERM ──► LAST_GRACE ──► SIGKILL

What is left of a broken group may hang in a collective on its GPU, which waits for the dead one for ever: nothing is gained
by the patience that a shard which stops in order deserves. A replica of one process is a group of one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import structlog

from text_generation_launcher.child import run_to_end
from text_generation_launcher.plan import ShardSpec
from text_generation_launcher.stop import StopSignals
from text_generation_proto.process import ExitCode

FAREWELL = 1.5
"""Seconds in which the others see for themselves that the group is broken. How they end then is known, and logged by them."""
LAST_GRACE = 2.0
"""Seconds between SIGTERM and SIGKILL for those that have not seen it."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class End:
    """How a process ended by itself."""

    rank: int
    code: int


async def run_group(specs: Sequence[ShardSpec], stop: StopSignals, *, json_output: bool) -> End:
    """Run the shards until one ends by itself and all have ended. Returns the end that broke the group.

    Cancelled, end them all in order first.
    """
    ends: list[End] = []
    patience = _Patience(stop)

    async def run(spec: ShardSpec) -> None:
        try:
            code = await run_to_end(spec, patience, json_output=json_output)
        except OSError as error:  # no memory or no descriptors for another process, perhaps only now
            log.error("shard cannot be started", replica=spec.replica, rank=spec.rank, reason=str(error))
            code = ExitCode.FAILED
        ends.append(End(spec.rank, code))

    async with asyncio.TaskGroup() as life:
        members = [life.create_task(run(spec)) for spec in specs]
        await asyncio.wait(members, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait(members, timeout=FAREWELL)
        patience.is_over = True
        for member in members:
            member.cancel()
    return cause(ends)


def cause(ends: Sequence[End]) -> End:
    """The first end that is no consequence of another: who loses a peer ends as who finds a bug."""
    return next((end for end in ends if end.code != ExitCode.BUG), ends[0])


class _Patience(StopSignals):
    """The patience of `stop` with a group, which is short once the group is broken."""

    def __init__(self, stop: StopSignals) -> None:
        super().__init__()
        self._stop = stop
        self.is_over = False

    @asynccontextmanager
    async def patience(self, seconds: float, remind: Callable[[], None]) -> AsyncIterator[None]:
        async with self._stop.patience(min(seconds, LAST_GRACE) if self.is_over else seconds, remind):
            yield
