"""Keep the shards of a plan running: started, started again when they die, given up when that is hopeless.

One task a replica: the group of shards that serve it together, which is one shard unless the model is cut. What the task
knows of its group it keeps in the group's seat, where the other tasks see it: whether to give up depends on all of them. Of
a group that loses one process, nothing is kept: it dies, is started again and counts its deaths as one.

    start ──► loads ──► serves ──┐
      ▲                │         │ ends by itself
      │                ▼         ▼
      └── delay ◄──── dead: its sockets are removed, the row of its deaths grows (restarts.py)
                        │
                        ▼ nobody serves and nobody has a restart left
                      ShardsHopeless, or ChildLost where none is to be restarted

The router is told nothing: its stream breaks, and it connects to the same address again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import structlog

from text_generation_launcher.endings import ChildFailed, ChildLost, ShardsHopeless, ending
from text_generation_launcher.group import End, run_group
from text_generation_launcher.plan import ShardSpec
from text_generation_launcher.readiness import shard_serving
from text_generation_launcher.restarts import RestartPolicy, Row
from text_generation_launcher.stop import StopSignals
from text_generation_proto.process import remove_socket, socket_path

log = structlog.get_logger()


class Seat:
    """The place of one replica, whichever processes sit there."""

    def __init__(self, group: Sequence[ShardSpec]) -> None:
        self.group = group
        """Its shards, by rank."""
        self.row = Row()
        self.died_at: float | None = None
        """When the last group here ended; None: none has."""
        self.serving = asyncio.Event()
        self.serving_since = 0.0

    @property
    def replica(self) -> int:
        """Which copy of the model is served here."""
        return self.group[0].replica

    def serves(self) -> None:
        """The health services of all its shards say so."""
        self.serving.set()
        self.serving_since = time.monotonic()

    def vacate(self) -> float:
        """The group has ended, and its sockets go. Returns the seconds it served, 0 if it never did."""
        now = time.monotonic()
        served = now - self.serving_since if self.serving.is_set() else 0.0
        self.serving.clear()
        self.died_at = now
        for address in {address for spec in self.group for address in (spec.address, spec.group_address)}:
            if path := socket_path(address):  # a shard that was killed could not do this itself
                remove_socket(path)
        return served


class ShardKeeper:
    """Runs the shards of a plan, one task a group."""

    def __init__(
        self,
        groups: Sequence[Sequence[ShardSpec]],
        stop: StopSignals,
        policy: RestartPolicy,
        ready: asyncio.Event,
        *,
        json_output: bool,
    ) -> None:
        """`ready` is set once the router answers, too: before that, a death is a failure to start."""
        self._seats = tuple(Seat(group) for group in groups)
        self._stop = stop
        self._policy = policy
        self._ready = ready
        self._json_output = json_output

    def start(self, tasks: asyncio.TaskGroup) -> None:
        """Run all shards. Their tasks raise ChildFailed, ChildLost or ShardsHopeless; cancelled, they end the shards."""
        for seat in self._seats:
            tasks.create_task(self._keep(seat))

    async def serving(self) -> None:
        """Return once each shard has come to serve."""
        for seat in self._seats:
            await seat.serving.wait()

    async def _keep(self, seat: Seat) -> None:
        while True:
            end, served = await self._run(seat)
            died = {"replica": seat.replica, "rank": end.rank} | ending(end.code)
            if not self._ready.is_set():
                log.error("shard failed to start", **died)
                raise ChildFailed(seat.group[end.rank].name)
            seat.row = self._policy.after_death(seat.row, served, end.code)
            lost = self._all_is_lost()
            delay = None if lost else self._policy.delay(seat.row)
            log.error("shard died", **died, restart_in_s=delay)
            if lost:
                raise self._give_up()
            if delay is None:
                return
            await asyncio.sleep(delay)

    async def _run(self, seat: Seat) -> tuple[End, float]:
        """One group in this seat, from its start to its end: what ended it, and the seconds it served."""
        try:
            async with asyncio.TaskGroup() as life:
                noticing = life.create_task(self._notice_serving(seat))
                end = await run_group(seat.group, self._stop, json_output=self._json_output)
                noticing.cancel()
        finally:
            served = seat.vacate()
        return end, served

    async def _notice_serving(self, seat: Seat) -> None:
        async with asyncio.TaskGroup() as tasks:
            for spec in seat.group:
                tasks.create_task(shard_serving(spec.address))
        seat.serves()
        if seat.died_at is not None:
            seconds = round(seat.serving_since - seat.died_at, 2)
            log.info("shard serves again", replica=seat.replica, seconds=seconds)

    def _all_is_lost(self) -> bool:
        """Whether no shard serves and none has a restart left. One that loads does not count: it may do so for ever."""
        return all(not seat.serving.is_set() and self._policy.hopeless(seat.row) for seat in self._seats)

    def _give_up(self) -> Exception:
        self._stop.expect_nothing()
        if self._policy.max_restarts == 0:
            return ChildLost("no shard is left")
        log.error("giving up: no shard serves, and none is worth another restart", shards=len(self._seats))
        return ShardsHopeless("no shard serves")
