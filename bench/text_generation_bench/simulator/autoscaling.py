"""Autoscaling of simulated replicas, by the algorithm of Kubernetes' HorizontalPodAutoscaler as the Helm chart sets it.

Every 15 s each rule proposes a number of replicas, and the largest proposal counts. More replicas start at once and serve
after a start-up delay. Fewer remain only if no proposal of the last ten minutes was larger; a replica that leaves is drained
first. The time of its GPU counts from the start to the end of the drain.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from text_generation_router.scheduling.scheduler import Scheduler

SYNC_S = 15.0
"""Time between two decisions."""
START_UP_S = 120.0
"""Time from the start of a replica until it serves: pod, weights, graphs."""
UP_S = 60.0
"""Time in which replicas are added once: as many as there are, or two."""
DOWN_S = 60.0
"""Time in which one replica is removed."""
DOWN_WINDOW_S = 600.0
"""No proposal of this time may be larger than the number scaled down to."""
TOLERANCE = 0.1
"""A metric this close to its target proposes no change."""


@dataclass(frozen=True, slots=True)
class Load:
    """Metrics that rules read."""

    serving: int
    waiting: int
    queue_seconds: float
    busy_ratio: float
    cpu_use: float
    """Step time over time, mean over serving replicas: a step of any batch keeps one core busy."""


Rule = Callable[[Load], int]
"""Returns the proposed number of replicas."""


def by_value(read: Callable[[Load], float], target: float) -> Rule:
    """Return a rule in proportion to a metric, of type Value or Utilization."""

    def propose(load: Load) -> int:
        ratio = read(load) / target
        return load.serving if abs(ratio - 1.0) <= TOLERANCE else math.ceil(load.serving * ratio)

    return propose


def by_average(read: Callable[[Load], float], target: float) -> Rule:
    """Return a rule that shares a sum among replicas, of type AverageValue."""
    return lambda load: math.ceil(read(load) / target)


@dataclass(slots=True)
class _ScaledReplica:
    """One replica that may run."""

    number: int
    started: float | None = None
    """None: it does not run."""
    serving: bool = False
    draining: bool = False


class Autoscaler:
    """Starts, drains and stops the replicas of a scheduler."""

    def __init__(self, rules: Sequence[Rule], scheduler: Scheduler, max_replicas: int) -> None:
        self._rules = rules
        self._scheduler = scheduler
        self._replicas = [_ScaledReplica(0, started=0.0, serving=True), *map(_ScaledReplica, range(1, max_replicas))]
        """By number. The first one serves from the start."""
        self._proposals: deque[tuple[float, int]] = deque()
        self._steps: deque[tuple[float, float]] = deque([(0.0, 0.0)])
        """(time, step time of all replicas so far) of the last minute."""
        self._added_at = self._removed_at = -math.inf
        self._stopped_s = 0.0
        """Time that stopped replicas ran."""

    def replica_seconds(self, now: float) -> float:
        """Return the time that replicas ran, in sum."""
        return self._stopped_s + sum(now - replica.started for replica in self._replicas if replica.started is not None)

    def step(self, now: float, step_s: float) -> tuple[list[int], list[int]]:
        """Decide; `step_s` is the step time of all replicas so far. Return the replicas to open and those to close."""
        opened, closed = [], []
        for replica in self._replicas:
            if replica.started is None:
                continue
            if not replica.serving and now >= replica.started + START_UP_S:
                replica.serving = True
                opened.append(replica.number)
            elif replica.draining and not self._occupied(replica.number):
                self._stop(replica, now)
                closed.append(replica.number)
        self._scale(now, self._load(now, step_s))
        return opened, closed

    def _stop(self, replica: _ScaledReplica, now: float) -> None:
        self._stopped_s += now - (replica.started or 0.0)
        self._replicas[replica.number] = _ScaledReplica(replica.number)

    def _occupied(self, number: int) -> bool:
        replica = self._scheduler.replicas[number]
        return replica is not None and replica.occupied_slots > 0

    def _load(self, now: float, step_s: float) -> Load:
        stats = self._scheduler.stats(now)
        since, before = self._steps[0]
        self._steps.append((now, step_s))
        if now - since >= UP_S:
            self._steps.popleft()
        cpu_use = (step_s - before) / (now - since) / max(1, stats.serving_replicas)
        return Load(stats.serving_replicas, stats.waiting, stats.queue_seconds, stats.busy_ratio, cpu_use)

    def _scale(self, now: float, load: Load) -> None:
        proposal = max(1, min(len(self._replicas), max(rule(load) for rule in self._rules)))
        self._proposals.append((now, proposal))
        while self._proposals[0][0] < now - DOWN_WINDOW_S:
            self._proposals.popleft()
        running = [replica for replica in self._replicas if replica.started is not None and not replica.draining]
        if proposal > len(running) and now >= self._added_at + UP_S:
            self._added_at = now
            idle = [replica for replica in self._replicas if replica.started is None]
            for replica in idle[: min(proposal - len(running), max(2, len(running)))]:
                replica.started = now
        elif max(number for _, number in self._proposals) < len(running) and now >= self._removed_at + DOWN_S:
            self._removed_at = now
            replica = max(running, key=lambda replica: (not replica.serving, replica.number))
            if replica.serving:
                replica.draining = True
                self._scheduler.drain(replica.number)
            else:
                self._stop(replica, now)
