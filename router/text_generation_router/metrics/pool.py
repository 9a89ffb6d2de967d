"""Figures that the scheduler keeps, read when they are scraped: queue, slots, KV blocks, replicas; over all replicas.

The five under TensorRT-LLM's names are what gateways of the Kubernetes inference extension look for.
"""

from __future__ import annotations

from text_generation_router.metrics.instruments import Instrument, Reading
from text_generation_router.scheduling.scheduler import Scheduler


def pool_figures(scheduler: Scheduler) -> list[Instrument]:
    """Everything worth knowing of the scheduler."""

    def usage() -> float:
        return scheduler.used_blocks / max(1, scheduler.num_blocks)

    def capacity() -> float:
        return scheduler.num_blocks * scheduler.block_size

    return [
        Reading("tgi_queue_size", "Requests waiting in the queue", lambda: scheduler.waiting),
        Reading("tgi_batch_current_size", "Requests running", lambda: scheduler.running),
        Reading(
            "tgi_batch_current_max_tokens",
            "Tokens the running requests may come to have, prompts included",
            lambda: scheduler.promised_tokens,
        ),
        Reading("tgi_batch_max_total_tokens", "Tokens the KV cache holds", capacity),
        Reading("tgi_batch_total_tokens", "Tokens of the KV cache in use", lambda: scheduler.used_tokens),
        Reading("trtllm_num_requests_waiting", "Requests waiting in the queue", lambda: scheduler.waiting),
        Reading("trtllm_num_requests_running", "Requests running", lambda: scheduler.running),
        Reading("trtllm_kv_cache_utilization", "Share of the KV cache in use, 0 to 1", usage),
        Reading("trtllm_kv_cache_tokens_per_block", "Tokens a KV block holds", lambda: scheduler.block_size),
        Reading("trtllm_kv_cache_max_blocks", "KV blocks there are", lambda: scheduler.num_blocks),
        Reading("text_generation_kv_cache_usage_ratio", "Share of the KV cache in use, 0 to 1", usage),
        Reading(
            "text_generation_preemptions_total",
            "Times a running request was put back in the queue because the KV cache was full",
            lambda: scheduler.preemptions,
            "counter",
        ),
        *_prefix_figures(scheduler),
        *_replica_figures(scheduler),
        Reading(
            "text_generation_queued_tokens", "Tokens of work in the queue, as expected", lambda: scheduler.queued_tokens
        ),
        Reading(
            "text_generation_requests_expired_total",
            "Requests whose deadline passed, in the queue or later",
            lambda: scheduler.expirations,
            "counter",
        ),
        Reading(
            "text_generation_sequences_cancelled_total",
            "Sequences dropped before their own end: the client left, a stop sequence was found, another one failed",
            lambda: scheduler.cancellations,
            "counter",
        ),
    ]


def _prefix_figures(scheduler: Scheduler) -> list[Instrument]:
    return [
        Reading(
            "text_generation_prefix_cache_queries_tokens_total",
            "Prompt tokens of requests that left the queue",
            lambda: scheduler.prompt_tokens,
            "counter",
        ),
        Reading(
            "text_generation_prefix_cache_hits_tokens_total",
            "Of these, tokens that were in the KV cache already",
            lambda: scheduler.hit_tokens,
            "counter",
        ),
        Reading(
            "text_generation_prefix_cache_blocks",
            "KV blocks kept for prompts to come, whether in use or not",
            lambda: scheduler.cached_blocks,
        ),
    ]


def _replica_figures(scheduler: Scheduler) -> list[Instrument]:
    return [
        Reading("text_generation_replicas", "Replicas there should be", lambda: scheduler.replicas),
        Reading("text_generation_replicas_serving", "Replicas that serve now", lambda: scheduler.open_replicas),
        Reading(
            "text_generation_request_moves_total",
            "Times a running request lost its shard, to go on elsewhere or once that was back",
            lambda: scheduler.moves,
            "counter",
        ),
    ]


def pool_status(scheduler: Scheduler) -> dict[str, object]:
    """What /info tells of the replicas and their prefix caches."""
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
