"""SchedulerStats: gauges and counters of a scheduler, over all replicas."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from text_generation_router.scheduling.kv_cache import KVCache


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Gauges and counters over all replicas. Counters never decrease. `metrics.scheduler` documents them."""

    waiting: int
    queued_tokens: int
    queue_seconds: float
    busy_ratio: float
    running: int
    promised_tokens: int
    block_usage: Mapping[str, tuple[int, int]]
    """See the function of this name."""
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
    def used_blocks(self) -> int:
        return sum(used for used, _ in self.block_usage.values())

    @property
    def kv_usage(self) -> float:
        return max((used / max(1, size) for used, size in self.block_usage.values()), default=0.0)

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / max(1, self.prompt_tokens)


def block_usage(caches: Iterable[KVCache]) -> dict[str, tuple[int, int]]:
    """Return the KV blocks in use, and all, of each group of caches, by name."""
    usage: dict[str, tuple[int, int]] = {}
    for cache in caches:
        for name, (used, size) in cache.usage.items():
            all_used, all_blocks = usage.get(name, (0, 0))
            usage[name] = all_used + used, all_blocks + size
    return usage
