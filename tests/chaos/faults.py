"""The faults of the matrix: the way each is caused and ended, and its documented outcome."""

from __future__ import annotations

import resource
import signal
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from itertools import product

import psutil
from server import ROLES, Server
from traffic import Traffic, generation

from text_generation_common.exit_codes import ExitCode

PHASES = ("load", "prefill", "decode", "drain", "idle")
HANG_TIMEOUT_S = 15.0
"""--hang-timeout of the server: its default."""
SERVER_ROLES = ("launcher", "router", "shard", "worker")
LIMITED_ROLES = ("launcher", "router", "shard")
"""A worker has limits of its own, below those of the server, and may run as another user."""
HANGING_PROMPT = "six seven eight nine ten"
"""The shard's engine hangs at its fourth token."""


class Harm(Enum):
    """The most that a fault may do to the process it hits."""

    NONE = "none"
    """The process stands still for a while, or lacks a resource that it can do without."""
    SHORTAGE = "shortage"
    """Operations fail for lack of a resource: single requests are refused or fail, or the process ends."""
    DEATH = "death"


@dataclass
class Target:
    """The process that a fault hits, and its surroundings."""

    server: Server
    traffic: Traffic
    role: str
    process: psutil.Process
    saved: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Limits before the fault."""


def nothing(_: Target) -> None:
    """Let the fault end by itself."""


@dataclass(frozen=True)
class Fault:
    """One fault."""

    name: str
    inject: Callable[[Target], None]
    end: Callable[[Target], None] = nothing
    seconds: float = 0.0
    """Time from `inject` to `end`."""
    harm: Harm = Harm.NONE
    roles: tuple[str, ...] = ROLES
    phases: tuple[str, ...] = PHASES
    signal: int = signal.SIGKILL
    """The signal that kills the launcher, with Harm.DEATH."""
    stops: bool = False
    """The process gives no sign of life until the end: longer than HANG_TIMEOUT_S it is killed, if it is watched."""
    spoils: bool = False
    """The server is not used for another case."""
    log_to_file: bool = False

    def harm_to(self, role: str) -> Harm:
        """Return the most that may happen to a process of this role."""
        if self.stops and self.seconds > HANG_TIMEOUT_S and role in ("router", "shard"):
            return Harm.DEATH
        return self.harm


def send(number: int) -> Callable[[Target], None]:
    return lambda target: target.process.send_signal(number)


def resume(target: Target) -> None:
    if target.process.is_running():
        target.process.resume()


def slow_down(target: Target) -> None:
    """Let the process run in a tenth of the time, for SLOW_S seconds."""

    def alternate() -> None:
        end = time.monotonic() + SLOW_S
        try:
            while time.monotonic() < end:
                target.process.suspend()
                time.sleep(0.09)
                target.process.resume()
                time.sleep(0.01)
        except psutil.NoSuchProcess:
            pass

    threading.Thread(target=alternate).start()


def limit(kind: int, used: Callable[[psutil.Process], int]) -> Callable[[Target], None]:
    """Return a fault that leaves the process no more of a resource than it uses."""

    def inject(target: Target) -> None:
        pid = target.process.pid
        target.saved[kind] = resource.prlimit(pid, kind)
        resource.prlimit(pid, kind, (used(target.process), target.saved[kind][1]))

    return inject


def lift(target: Target) -> None:
    for kind, limits in target.saved.items():
        if target.process.is_running():
            resource.prlimit(target.process.pid, kind, limits)


def descriptors(process: psutil.Process) -> int:
    return process.num_fds() + 1


def data(process: psutil.Process) -> int:
    return int(process.memory_info().data) + (4 << 20)


def hang_engine(target: Target) -> None:
    target.traffic.open(generation(50, HANGING_PROMPT))


def fill_log(target: Target) -> None:
    kind = resource.RLIMIT_FSIZE
    target.saved[kind] = resource.prlimit(target.process.pid, kind)
    resource.prlimit(target.process.pid, kind, (target.server.log.stat().st_size, target.saved[kind][1]))


def stall_log(target: Target) -> None:
    target.server.log_flows.clear()


def release_log(target: Target) -> None:
    target.server.log_flows.set()


def remove_socket(target: Target) -> None:
    for path in target.server.folder.rglob("shard-0"):
        path.unlink()


def remove_model(target: Target) -> None:
    """Move the model away; kill a process that reads it when it starts again."""
    target.server.model.rename(target.server.home / "moved")
    if target.role in ("shard", "worker"):
        target.process.kill()


def restore_model(target: Target) -> None:
    (target.server.home / "moved").rename(target.server.model)


SLOW_S = 5.0
FAULTS = (
    Fault("SIGKILL", send(signal.SIGKILL), harm=Harm.DEATH),
    Fault("SIGABRT", send(signal.SIGABRT), harm=Harm.DEATH, signal=signal.SIGABRT),
    *(Fault(f"SIGSTOP {s} s", send(signal.SIGSTOP), resume, s, stops=True) for s in (3, 20, 120)),
    Fault("engine hang", hang_engine, seconds=20, stops=True, roles=("shard",), phases=("decode",)),
    Fault("slow x 10", slow_down, seconds=SLOW_S + 0.1),
    Fault("descriptors", limit(resource.RLIMIT_NOFILE, descriptors), lift, 5, Harm.SHORTAGE, LIMITED_ROLES),
    Fault("memory", limit(resource.RLIMIT_DATA, data), lift, 5, Harm.SHORTAGE, LIMITED_ROLES),
    Fault("log full", fill_log, lift, 5, roles=("launcher",), log_to_file=True),
    Fault("log stalled", stall_log, release_log, 5, roles=("launcher",)),
    Fault("socket removed", remove_socket, seconds=1, roles=("shard",), phases=PHASES[1:], spoils=True),
    Fault("model removed", remove_model, restore_model, 3, Harm.SHORTAGE, SERVER_ROLES, PHASES[1:]),
    Fault("connection reset", send(signal.SIGUSR1), seconds=1, roles=("client",)),
)
LEFT_OUT = {
    "clock step": "libfaketime breaks time.sleep of Python 3.11, which waits until a time of the monotonic clock"
}


@dataclass(frozen=True)
class Case:
    """One cell of the matrix."""

    fault: Fault
    role: str
    phase: str

    def __str__(self) -> str:
        return f"{self.fault.name}/{self.role}/{self.phase}"

    @property
    def makes_sense(self) -> bool:
        """Return True if the fault concerns the process, and the process exists in the phase."""
        exists = self.role != "client" or self.phase != "load"
        return exists and self.role in self.fault.roles and self.phase in self.fault.phases

    @property
    def harm(self) -> Harm:
        return self.fault.harm_to(self.role)

    @property
    def ends(self) -> tuple[str, ...]:
        """Return the documented ends of streams, or how they begin."""
        refused = ("refused 503", "refused 429", "error overloaded")
        # In TGI's dialect and in OpenAI's.
        failed = ("refused 424", "refused 500", "error generation", "error server_error")
        if self.role in ("launcher", "router") and self.harm is not Harm.NONE:
            return ("finished", "error", "closed", "unreachable", "refused 4", "refused 503", *failed)
        if self.phase == "drain":
            return ("finished", "unreachable", *refused)
        if self.role == "worker":
            return ("finished", *refused)
        if self.harm is Harm.SHORTAGE:
            return ("finished", *refused, *failed)
        return ("finished",)

    @property
    def exit_codes(self) -> set[int]:
        """Return the launcher's documented exit codes; without any the server must survive."""
        codes: set[int] = {ExitCode.STOPPED} if self.phase == "drain" else set()
        if self.harm is Harm.NONE or self.role == "client":
            return codes
        if self.role == "worker":  # the router does not start without its workers, and does not need each of them later
            return {ExitCode.FAILED} if self.phase == "load" else codes
        if self.role == "launcher":
            return {-self.fault.signal} if self.harm is Harm.DEATH else codes | {ExitCode.FAILED}
        return {ExitCode.FAILED} if self.phase == "load" else codes

    @property
    def may_survive(self) -> bool:
        """Return True if the server may serve after the fault."""
        if self.phase == "drain":
            return False
        starts = self.phase == "load" and (self.fault.stops or self.role == "worker")
        return not self.exit_codes or self.harm is Harm.SHORTAGE or starts

    @property
    def estimate(self) -> float:
        """Return about the seconds that the case takes."""
        return self.fault.seconds + 10 + (10 if self.exit_codes or self.phase == "load" else 0)


def matrix(faults: Iterable[Fault] = FAULTS) -> list[Case]:
    """Return every case that makes sense."""
    cases = (Case(fault, role, phase) for fault, role, phase in product(faults, ROLES, PHASES))
    return [case for case in cases if case.makes_sense]
