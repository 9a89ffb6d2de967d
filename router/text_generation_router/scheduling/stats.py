"""SchedulerStats: the gauges and counters of a scheduler."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Gauges and counters over all replicas. Counters never decrease. `metrics.scheduler` documents them."""

    waiting: int
    queued_tokens: int
    queue_seconds: float
    busy_ratio: float
    running: int
    promised_tokens: int
    used_blocks: int
    used_tokens: int
    cached_blocks: int
    num_blocks: int
    block_size: int
    num_replicas: int
    serving_replicas: int
    preemptions: int
    cancellations: int
    expirations: int
    moves: int
    prompt_tokens: int
    hit_tokens: int
