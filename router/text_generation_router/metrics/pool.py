"""Metrics read from the scheduler when scraped: queue, slots, KV blocks, replicas; summed over all replicas.

The five names that begin with `trtllm_` are those that gateways of the Kubernetes inference extension read.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from text_generation_router.metrics.instruments import Reading, Registry
from text_generation_router.scheduling.scheduler import Scheduler


def _kv_usage(scheduler: Scheduler) -> float:
    return scheduler.used_blocks / max(1, scheduler.num_blocks)


def _kv_tokens(scheduler: Scheduler) -> float:
    return scheduler.num_blocks * scheduler.block_size


_GAUGES: list[tuple[str, str, Callable[[Scheduler], float]]] = [
    ("tgi_queue_size", "Requests in the queue", lambda scheduler: scheduler.waiting),
    ("tgi_batch_current_size", "Requests running", lambda scheduler: scheduler.running),
    (
        "tgi_batch_current_max_tokens",
        "Largest number of tokens that the running requests may reach, prompts included",
        lambda scheduler: scheduler.promised_tokens,
    ),
    ("tgi_batch_max_total_tokens", "Size of the KV cache, in tokens", _kv_tokens),
    ("tgi_batch_total_tokens", "Tokens of the KV cache in use", lambda scheduler: scheduler.used_tokens),
    ("trtllm_num_requests_waiting", "Requests in the queue", lambda scheduler: scheduler.waiting),
    ("trtllm_num_requests_running", "Requests running", lambda scheduler: scheduler.running),
    ("trtllm_kv_cache_utilization", "Share of the KV cache in use, 0 to 1", _kv_usage),
    ("trtllm_kv_cache_tokens_per_block", "Tokens per KV block", lambda scheduler: scheduler.block_size),
    ("trtllm_kv_cache_max_blocks", "KV blocks in total", lambda scheduler: scheduler.num_blocks),
    ("text_generation_kv_cache_usage_ratio", "Share of the KV cache in use, 0 to 1", _kv_usage),
    (
        "text_generation_prefix_cache_blocks",
        "KV blocks in the prefix cache, in use or not",
        lambda scheduler: scheduler.cached_blocks,
    ),
    ("text_generation_queued_tokens", "Estimated tokens of queued work", lambda scheduler: scheduler.queued_tokens),
    ("text_generation_replicas", "Configured replicas", lambda scheduler: scheduler.replicas),
    ("text_generation_replicas_serving", "Replicas that serve now", lambda scheduler: scheduler.open_replicas),
]
_COUNTERS: list[tuple[str, str, Callable[[Scheduler], float]]] = [
    (
        "text_generation_preemptions_total",
        "Running requests put back into the queue because the KV cache was full",
        lambda scheduler: scheduler.preemptions,
    ),
    (
        "text_generation_prefix_cache_queries_tokens_total",
        "Prompt tokens of requests that left the queue",
        lambda scheduler: scheduler.prompt_tokens,
    ),
    (
        "text_generation_prefix_cache_hits_tokens_total",
        "Prompt tokens found in the prefix cache",
        lambda scheduler: scheduler.hit_tokens,
    ),
    (
        "text_generation_requests_expired_total",
        "Requests whose deadline passed, in the queue or later",
        lambda scheduler: scheduler.expirations,
    ),
    (
        "text_generation_sequences_cancelled_total",
        "Sequences cancelled: the client left, a stop sequence was found, or another one failed",
        lambda scheduler: scheduler.cancellations,
    ),
    (
        "text_generation_request_moves_total",
        "Running requests that lost their shard and continued elsewhere, or after its restart",
        lambda scheduler: scheduler.moves,
    ),
]


def add_scheduler_readings(registry: Registry, scheduler: Scheduler) -> None:
    """Add the metrics that the scheduler keeps."""
    for kind, rows in (("gauge", _GAUGES), ("counter", _COUNTERS)):
        for name, documentation, read in rows:
            registry.add(Reading(name, documentation, partial(read, scheduler), kind))


def scheduler_status(scheduler: Scheduler) -> dict[str, object]:
    """Replicas and prefix caches, for /info."""
    asked, hit = scheduler.prompt_tokens, scheduler.hit_tokens
    return {
        "replicas": scheduler.replicas,
        "replicas_serving": scheduler.open_replicas,
        "prefix_cache": {
            "query_tokens": asked,
            "hit_tokens": hit,
            "hit_rate": hit / asked if asked else 0.0,
            "cached_tokens": scheduler.cached_blocks * scheduler.block_size,
        },
    }
