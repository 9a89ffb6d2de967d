"""Metrics read from the scheduler when scraped: queue, slots, KV blocks, replicas; summed over all replicas.

The five names that begin with `trtllm_` are those that gateways of the Kubernetes inference extension read.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from operator import attrgetter

from text_generation_router.metrics.instruments import head_text, labels_text, reading_text
from text_generation_router.scheduling.scheduler import Scheduler, SchedulerStats


def kv_usage(stats: SchedulerStats) -> float:
    """Return the share of the KV cache in use, 0 to 1."""
    return stats.used_blocks / max(1, stats.num_blocks)


_GAUGES: list[tuple[str, str, Callable[[SchedulerStats], float]]] = [
    ("tgi_queue_size", "Requests in the queue", lambda stats: stats.waiting),
    ("tgi_batch_current_size", "Requests running", lambda stats: stats.running),
    (
        "tgi_batch_current_max_tokens",
        "Largest number of tokens that the running requests may reach, prompts included",
        lambda stats: stats.promised_tokens,
    ),
    (
        "tgi_batch_max_total_tokens",
        "Size of the KV cache, in tokens",
        lambda stats: stats.num_blocks * stats.block_size,
    ),
    ("tgi_batch_total_tokens", "Tokens of the KV cache in use", lambda stats: stats.used_tokens),
    ("trtllm_num_requests_waiting", "Requests in the queue", lambda stats: stats.waiting),
    ("trtllm_num_requests_running", "Requests running", lambda stats: stats.running),
    ("trtllm_kv_cache_utilization", "Share of the KV cache in use, 0 to 1", kv_usage),
    ("trtllm_kv_cache_tokens_per_block", "Tokens per KV block", lambda stats: stats.block_size),
    ("trtllm_kv_cache_max_blocks", "KV blocks in total", lambda stats: stats.num_blocks),
    ("text_generation_kv_cache_usage_ratio", "Share of the KV cache in use, 0 to 1", kv_usage),
    (
        "text_generation_prefix_cache_blocks",
        "KV blocks in the prefix cache, in use or not",
        lambda stats: stats.cached_blocks,
    ),
    ("text_generation_queued_tokens", "Estimated tokens of queued work", lambda stats: stats.queued_tokens),
    (
        "text_generation_queue_seconds",
        "Queued tokens over the measured throughput of all replicas, in seconds",
        lambda stats: stats.queue_seconds,
    ),
    (
        "text_generation_busy_ratio",
        "Step time over time, 0 to 1, mean over serving replicas; "
        "a step that only decodes counts for the share of slots or KV blocks in use",
        lambda stats: stats.busy_ratio,
    ),
]
_REPLICAS: list[tuple[str, str, Callable[[SchedulerStats], float]]] = [
    ("text_generation_replicas", "Replicas, serving or not", lambda stats: stats.num_replicas),
    ("text_generation_replicas_serving", "Replicas that serve now", lambda stats: stats.serving_replicas),
]
_COUNTERS: list[tuple[str, str, Callable[[SchedulerStats], float]]] = [
    (
        "text_generation_preemptions_total",
        "Running requests put back into the queue because the KV cache was full",
        lambda stats: stats.preemptions,
    ),
    (
        "text_generation_prefix_cache_queries_tokens_total",
        "Prompt tokens of requests that left the queue",
        lambda stats: stats.prompt_tokens,
    ),
    (
        "text_generation_prefix_cache_hits_tokens_total",
        "Prompt tokens found in the prefix cache",
        lambda stats: stats.hit_tokens,
    ),
    (
        "text_generation_requests_expired_total",
        "Requests whose deadline passed, in the queue or later",
        lambda stats: stats.expirations,
    ),
    (
        "text_generation_sequences_cancelled_total",
        "Sequences cancelled: the client left, a stop sequence was found, or another one failed",
        lambda stats: stats.cancellations,
    ),
    (
        "text_generation_request_moves_total",
        "Running requests that lost their shard, or the scheduler process, and went on",
        lambda stats: stats.moves,
    ),
]
_ADAPTER = attrgetter("request.adapter")
_ADAPTERS = (
    ("text_generation_adapter_requests_running", "Requests running, by LoRA adapter"),
    ("text_generation_adapter_requests_waiting", "Requests in the queue, by LoRA adapter"),
)


def requests_of_adapters(scheduler: Scheduler) -> tuple[dict[str, int], dict[str, int]]:
    """Return the requests that run and those that wait, by LoRA adapter: each that a replica holds."""
    if not (adapters := scheduler.adapters):
        return {}, {}
    waiting, known = Counter(map(_ADAPTER, scheduler.queue)), Counter(map(_ADAPTER, scheduler.requests.values()))
    return {name: known[name] - waiting[name] for name in adapters}, {name: waiting[name] for name in adapters}


def no_replicas_text() -> str:
    """Return the metrics of a router that has reached no shard yet: alerts need them."""
    return "".join(reading_text(name, documentation, "gauge", 0) for name, documentation, _ in _REPLICAS)


class SchedulerMetrics:
    """The metrics that the scheduler keeps; an Instrument. A scrape takes the statistics once."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def text(self) -> str:
        return "".join(self._texts())

    def _texts(self) -> Iterator[str]:
        stats = self._scheduler.stats(time.monotonic())
        for kind, rows in (("gauge", _GAUGES + _REPLICAS), ("counter", _COUNTERS)):
            for name, documentation, read in rows:
                yield reading_text(name, documentation, kind, read(stats))
        for (name, documentation), counts in zip(_ADAPTERS, requests_of_adapters(self._scheduler), strict=True):
            yield head_text(name, documentation, "gauge")
            yield from (f"{name}{labels_text({'adapter': adapter})} {count}.0\n" for adapter, count in counts.items())
