"""Restart processes that die, and give up when restarts are hopeless.

A unit is what starts and ends together: the shards of a replica, or one process of the router (units.py). One task runs each.

    start ──► load ──► serve ──┐
      ▲         │              │ ends by itself, or hangs
      │         ▼              ▼
      └─ delay ◄──── dead: sockets removed, failure streak updated
                       │
                       ▼ no unit of its kind serves and none has a restart left
                     the kind's final error

A unit that ends before it has ever served failed to start, which ends the server. If the server has answered clients before,
the unit is tried until no restart is left. A death after it has served is never a failed start, however early it comes.

The first restart comes almost at once, because most deaths are accidents. Further ones wait longer, so that a process that
cannot live does not keep the machine busy. After `max_restarts` restarts in a row another one is unlikely to help. It is
still tried, at the longest delay, while another unit of its kind serves.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from text_generation_common.descriptors import DescriptorReserve
from text_generation_common.exit_codes import ExitCode, exit_fields
from text_generation_common.log import log
from text_generation_common.resource_limits import low_limits
from text_generation_common.sockets import remove_socket
from text_generation_launcher.shutdown import GracefulShutdown
from text_generation_proto.addresses import socket_path

DELAYS = (0.1, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
"""Seconds from the first, second, … death in a row to the restart; the last value is used for all further ones."""
STABLE_AFTER = 2.0
"""Seconds of serving after which a death starts a new streak: the start was not at fault. The router handles requests
that kill the shards which serve them: it fails a request that loses several replicas in a row."""


class ServerEnded(Exception):
    """Serving cannot start or go on; the log has the reason."""

    def __init__(self, code: ExitCode) -> None:
        """`code`: of the launcher."""
        super().__init__(code.name)
        self.code = code


@dataclass(frozen=True, slots=True)
class FailureStreak:
    """The deaths of a unit without STABLE_AFTER seconds of serving in between."""

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
    """Seconds of serving after which a death starts a new streak; 0: any."""

    def after_death(self, streak: FailureStreak, served: float, exit_code: int) -> FailureStreak:
        """Return the streak after a death with this exit code that followed `served` seconds of serving (0: none)."""
        deaths = 1 if served and served >= self.stable_after else streak.deaths + 1
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


@dataclass(frozen=True, slots=True)
class UnitExit:
    """The end of a unit: that of the process which caused it."""

    child: str
    """Name of the process."""
    code: int
    fields: Mapping[str, object] = field(default_factory=dict)
    """Further fields for the log."""


@dataclass(eq=False)
class Unit(ABC):
    """Processes that start and end together, and the history of their deaths."""

    kind: str
    """Names it in the events of the log."""
    fields: Mapping[str, object]
    """Fields of its records in the log."""
    stop: GracefulShutdown
    reserve: DescriptorReserve
    """Descriptors for the starts and ends of processes."""
    addresses: Collection[str] = ()
    """The addresses that it listens on."""
    streak: FailureStreak = FailureStreak()
    serving: asyncio.Event = field(default_factory=asyncio.Event)
    has_served: bool = False
    """True once it has served, also in a former run."""
    _serving_since: float = 0.0
    _died_at: float | None = None

    @abstractmethod
    async def run(self) -> UnitExit:
        """Run the processes once, until all have ended. Calls `mark_serving`. When cancelled, stops them first."""

    async def run_process(self, running: Awaitable[int], name: str, **fields: object) -> UnitExit:
        """Return the end of a process that `running` runs."""
        try:
            code = await running
        except OSError as error:  # no memory or file descriptors for another process, perhaps only now
            log.error(self.event("cannot be started"), **self.fields, **fields, reason=str(error))
            code = ExitCode.FAILED
        return UnitExit(name, code, fields)

    def event(self, happening: str) -> str:
        """Return the event of a log record, such as "router died"."""
        return f"{self.kind} {happening}"

    async def run_once(self) -> tuple[UnitExit, float]:
        """Run the processes once; return their end and the seconds that they served, 0 if they never did."""
        try:
            end = await self.run()
        finally:
            self._died_at = time.monotonic()
            served = self._died_at - self._serving_since if self.serving.is_set() else 0.0
            self.serving.clear()
            for path in filter(None, map(socket_path, self.addresses)):
                remove_socket(path)  # a killed process could not
        return end, served

    def mark_serving(self) -> None:
        """Record that all processes serve."""
        self.serving.set()
        self.has_served = True
        self._serving_since = time.monotonic()
        if self._died_at is not None:
            seconds = round(self._serving_since - self._died_at, 2)
            log.info(self.event("serves again"), **self.fields, seconds=seconds)


@dataclass(frozen=True, slots=True)
class Restarts:
    """Keeps the units of one kind running, one task each."""

    units: Sequence[Unit]
    policy: RestartPolicy
    stop: GracefulShutdown
    """Learns of the end of the server."""
    answers: Callable[[], bool]
    """Says that the server has answered clients, perhaps before all units serve."""
    give_up: Callable[[str], ExitCode]
    """Logs the reason and returns the exit code when no unit serves and none has a restart left, given the last process that died."""

    def __len__(self) -> int:
        return len(self.units)

    @property
    def serving(self) -> int:
        return sum(unit.serving.is_set() for unit in self.units)

    @property
    def has_served(self) -> bool:
        return any(unit.has_served for unit in self.units)

    def start(self, tasks: asyncio.TaskGroup) -> None:
        """Start all units. Their tasks raise ServerEnded; cancelled, they stop the processes."""
        for unit in self.units:
            tasks.create_task(self._keep_running(unit))

    async def wait_until_serving(self) -> None:
        """Return once each unit has started to serve."""
        for unit in self.units:
            await unit.serving.wait()

    async def _keep_running(self, unit: Unit) -> None:
        while True:
            end, served = await unit.run_once()
            fields = {**unit.fields, **end.fields, **exit_fields(end.code)}
            unit.streak = self.policy.after_death(unit.streak, served, end.code)
            answers = self.answers()
            if not unit.has_served and (not answers or self.policy.hopeless(unit.streak)):
                log.error(unit.event("failed to start"), **fields, **low_limits())
                if not answers:
                    self.stop.requests_lost()
                raise ServerEnded(ExitCode.FAILED)
            # No unit serves and none has a restart left. A loading one counts as not serving.
            hopeless = all(not each.serving.is_set() and self.policy.hopeless(each.streak) for each in self.units)
            delay = None if hopeless else self.policy.delay(unit.streak)
            # A unit that served and ended with 0 was told to stop. It counts as a death: nothing else tells when to give up.
            planned = served > 0 and end.code == 0 and delay is not None
            record, happening = (log.warning, "ended") if planned else (log.error, "died")
            record(unit.event(happening), **fields, restart_in_s=delay)
            if hopeless:
                self.stop.requests_lost()
                raise ServerEnded(self.give_up(end.child))
            if delay is None:
                return
            await asyncio.sleep(delay)
