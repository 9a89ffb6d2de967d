"""Progress of the engine: a step that does not end is found, and told to router and launcher.

    engine's thread   begin ─► step ─► begin ─► step ─► … ─► idle
    event loop        check, every half second ─► health NOT_SERVING (router) and heartbeat STUCK (launcher)

The router moves the sequences to other replicas; the launcher logs the stacks of all threads, kills and restarts the shard.
A step is overdue after --hang-timeout seconds and STUCK_AFTER_STEPS times the longest recent decode step. Each prompt token may take as
long as that step, which it never does, all of them PREFILL_S. Before the first decode step nothing tells a long prompt from a hang.
"""

import asyncio

from text_generation_common.heartbeat import ALIVE, CHECK_EVERY_S, STUCK, HeartbeatSender, Silence
from text_generation_common.log import log
from text_generation_shard.engine import Engine
from text_generation_shard.health import ShardHealth

PREFILL_S = 600.0
"""Most seconds that a step may take for its prompt tokens."""
STUCK_AFTER_STEPS = 20
"""A decode step is not overdue before it has lasted this many times the longest recent one."""
FORGET = 0.99
"""Factor per step by which the longest step is forgotten."""
LONG_STEP_S = 5.0
"""Seconds after which a step in progress is logged."""


class StepMonitor:
    """Observes the step in progress. The event loop calls `check`, the engine's thread the other methods."""

    def __init__(self) -> None:
        self._begun = 0
        self._busy = False
        self._longest_s = 0.0
        """Longest of the recent decode steps."""
        self._checked = 0
        self._silence = Silence()

    def begin(self) -> None:
        self._begun += 1
        self._busy = True

    def idle(self) -> None:
        """Record that the thread waits for orders."""
        self._busy = False

    def decoded(self, seconds: float) -> None:
        """Record the time of a step without prompt tokens."""
        self._longest_s = max(seconds, FORGET * self._longest_s)

    def check(self, engine: Engine, hang_timeout_s: float) -> bool:
        """Return True if the step in progress is overdue. Called every CHECK_EVERY_S."""
        self._silence.record(sign=not self._busy or self._begun != self._checked)
        self._checked = self._begun
        silent_s, prompt_tokens = self._silence.seconds, engine.prefilling
        prefill_s = min(prompt_tokens * (self._longest_s or PREFILL_S), PREFILL_S)
        limit_s = max(hang_timeout_s, STUCK_AFTER_STEPS * self._longest_s) + prefill_s
        if silent_s == LONG_STEP_S:
            log.warning("a step takes long", seconds=silent_s, prompt_tokens=prompt_tokens)
        return hang_timeout_s > 0 and self._silence.exceeds(limit_s)


async def report_progress(
    monitor: StepMonitor, engine: Engine, health: ShardHealth, hang_timeout_s: float, heartbeat: HeartbeatSender
) -> None:
    """Send heartbeats, and report NOT_SERVING while a step is overdue. Runs until cancelled."""
    was_stuck = False
    while True:
        stuck = monitor.check(engine, hang_timeout_s)
        if stuck != was_stuck:
            was_stuck = stuck
            if stuck:
                log.error("the step in progress does not end")
            else:
                log.warning("the step in progress has ended")
            await health.set_serving(serving=not stuck)
        heartbeat.send(STUCK if stuck else ALIVE)
        await asyncio.sleep(CHECK_EVERY_S)
