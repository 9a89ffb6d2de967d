"""Watchdog: detect that the engine will never produce anything again.

In 1.2 every request waits forever after a worker process died, or after the loop of the engine ended behind a failed step. Three
signs: a worker process is gone; the engine reports that it is not healthy; requests run and nothing arrives. A long prompt is not a
hang: iterations count as progress, and each waiting prompt token extends the time limit.
"""

import faulthandler
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from text_generation_common.heartbeat import CHECK_EVERY_S, Silence
from text_generation_shard.processes import Process, command, descendants

SECONDS_PER_PROMPT_TOKEN = 0.001
"""Time limit per waiting prompt token: a tenth of the speed of any usable machine."""
WORKER_COMMANDS = ("mpi4py.futures.server", "mgmn_leader_node", "mgmn_worker_node")
"""Parts of the command line of a process that runs the engine."""


def find_workers() -> list[Process]:
    """Return the engine's processes: one for each GPU, also for a single one, below a helper of MPI."""
    return [process for process in descendants() if any(part in command(process.pid) for part in WORKER_COMMANDS)]


@dataclass(frozen=True, slots=True)
class Activity:
    """The state of the requests that the watchdog judges; times of the monotonic clock."""

    running: int
    waiting_prompt_tokens: int
    """Prompt tokens of requests without a first token."""
    last_sign: float
    """Time of the last output, iteration, or submission to an idle engine."""


@dataclass(slots=True, eq=False)
class Watchdog:
    """Calls `on_broken` with a reason, at most once, from a thread of its own."""

    is_healthy: Callable[[], bool]
    activity: Callable[[], Activity]
    hang_timeout_s: float
    on_broken: Callable[[str], None]
    _processes: Sequence[Process] = ()
    _silence: Silence = field(default_factory=Silence)
    _last_sign: float | None = None
    _closing: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        threading.Thread(target=self._run, name="tensorrt-llm watchdog", daemon=True).start()

    def watch(self, processes: Sequence[Process]) -> None:
        self._processes = processes

    def close(self) -> None:
        """Stop checking; later events are part of the shutdown."""
        self._closing.set()

    def check(self) -> str | None:
        """Return why the engine is broken; None if it seems to work. Called every CHECK_EVERY_S."""
        for process in self._processes:
            if not process.is_alive:
                return f"worker process {process.pid} of the engine died"
        try:
            if not self.is_healthy():
                return "the engine says that it is not healthy"
        except Exception as error:  # noqa: BLE001 - an engine that cannot answer is not healthy
            return f"the engine does not say whether it is healthy: {type(error).__name__}: {error}"
        activity = self.activity()
        self._silence.record(sign=activity.running == 0 or activity.last_sign != self._last_sign)
        self._last_sign = activity.last_sign
        limit_s = self.hang_timeout_s + SECONDS_PER_PROMPT_TOKEN * activity.waiting_prompt_tokens
        if self.hang_timeout_s > 0 and self._silence.exceeds(limit_s):
            silent_s = self._silence.seconds
            return f"the engine has brought nothing for {silent_s:.0f} s, with {activity.running} requests running"
        return None

    def _run(self) -> None:
        while not self._closing.wait(CHECK_EVERY_S):
            if (reason := self.check()) is not None:
                if not self._closing.is_set():
                    faulthandler.dump_traceback(2)  # sys.stderr may be None
                    self.on_broken(reason)
                return
