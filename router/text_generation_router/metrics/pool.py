"""Figures that the scheduler keeps, read when they are scraped: queue, slots, KV blocks.

The five under TensorRT-LLM's names are what gateways of the Kubernetes inference extension look for.
"""

from __future__ import annotations

from text_generation_router.metrics.instruments import Instrument, Reading
from text_generation_router.scheduling.scheduler import Scheduler


def pool_figures(scheduler: Scheduler) -> list[Instrument]:
    """Everything worth knowing of one replica's scheduler."""

    def usage() -> float:
        return scheduler.used_blocks / scheduler.num_blocks

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
        Reading(
            "text_generation_sequences_cancelled_total",
            "Sequences dropped before their own end: the client left, a stop sequence was found, another one failed",
            lambda: scheduler.cancellations,
            "counter",
        ),
    ]
