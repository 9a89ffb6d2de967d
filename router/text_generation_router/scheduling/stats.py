"""SchedulerStats: what a scheduler tells of itself, for metrics, limits and the dashboard."""

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
    kv_usage: float
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

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / max(1, self.prompt_tokens)
