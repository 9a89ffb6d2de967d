"""Metrics read from the scheduler when scraped: queue, slots, KV blocks, replicas; summed over all replicas.

The five names that begin with `trtllm_` are those that gateways of the Kubernetes inference extension read.
"""

import time
from collections import Counter
from collections.abc import Iterator
from operator import attrgetter

from text_generation_router.metrics.instruments import head_text, labels_text, reading_text
from text_generation_router.scheduling.capacity import block_usage
from text_generation_router.scheduling.scheduler import Scheduler

_GAUGES: list[tuple[str, str, str]] = [
    ("tgi_queue_size", "Requests in the queue", "waiting"),
    ("tgi_batch_current_size", "Requests running", "running"),
    (
        "tgi_batch_current_max_tokens",
        "Largest number of tokens that the running requests may reach, prompts included",
        "promised_tokens",
    ),
    ("tgi_batch_max_total_tokens", "Size of the KV cache, in tokens", "num_tokens"),
    ("tgi_batch_total_tokens", "Tokens of the KV cache in use", "used_tokens"),
    ("trtllm_num_requests_waiting", "Requests in the queue", "waiting"),
    ("trtllm_num_requests_running", "Requests running", "running"),
    ("trtllm_kv_cache_utilization", "Share of the KV cache in use, of its fullest group, 0 to 1", "kv_usage"),
    ("trtllm_kv_cache_tokens_per_block", "Tokens per KV block", "block_size"),
    ("trtllm_kv_cache_max_blocks", "KV blocks in total, of the first group", "num_blocks"),
    ("text_generation_kv_cache_usage_ratio", "Share of the KV cache in use, of its fullest group, 0 to 1", "kv_usage"),
    ("text_generation_prefix_cache_blocks", "KV blocks in the prefix cache, in use or not", "cached_blocks"),
    ("text_generation_queued_tokens", "Estimated tokens of queued work", "queued_tokens"),
    (
        "text_generation_queue_seconds",
        "Queued tokens over the measured throughput of all replicas, in seconds",
        "queue_seconds",
    ),
    (
        "text_generation_busy_ratio",
        "Step time over time, 0 to 1, mean over serving replicas; "
        "a step that only decodes counts for the share of slots or KV blocks in use",
        "busy_ratio",
    ),
]
_REPLICAS: list[tuple[str, str, str]] = [
    ("text_generation_replicas", "Replicas (with attention data parallelism: ranks), serving or not", "num_replicas"),
    ("text_generation_replicas_serving", "Replicas that serve now", "serving_replicas"),
]
_COUNTERS: list[tuple[str, str, str]] = [
    (
        "text_generation_preemptions_total",
        "Running requests put back into the queue because the KV cache was full",
        "preemptions",
    ),
    (
        "text_generation_prefix_cache_queries_tokens_total",
        "Prompt tokens of requests that left the queue",
        "prompt_tokens",
    ),
    ("text_generation_prefix_cache_hits_tokens_total", "Prompt tokens found in the prefix cache", "hit_tokens"),
    ("text_generation_requests_expired_total", "Requests whose deadline passed, in the queue or later", "expirations"),
    (
        "text_generation_sequences_cancelled_total",
        "Sequences cancelled: the client left, a stop sequence was found, or another one failed",
        "cancellations",
    ),
    (
        "text_generation_request_moves_total",
        "Running requests that lost their shard, or the scheduler process, and went on",
        "moves",
    ),
]
_HOST: list[tuple[str, str, str, str]] = [
    ("blocks", "KV blocks of the host cache, of the first group", "gauge", "blocks"),
    ("used_blocks", "Those that hold a prefix", "gauge", "used"),
    ("stored_blocks_total", "Blocks copied from devices to the host cache, of all groups", "counter", "stored"),
    ("loaded_blocks_total", "Blocks copied from the host cache to devices, of all groups", "counter", "loaded"),
    (
        "failed_blocks_total",
        "Blocks of the host cache whose checksum was wrong; their tokens were computed again",
        "counter",
        "failed",
    ),
]
"""Names after `text_generation_host_cache_`."""
_GROUPS = (
    ("text_generation_kv_blocks_used", "KV blocks in use, by group of the cache, where there are several"),
    ("text_generation_kv_blocks", "KV blocks in total, by group of the cache, where there are several"),
)
_ADAPTER = attrgetter("request.adapter")
_ADAPTERS = (
    ("text_generation_adapter_requests_running", "Requests running, by LoRA adapter"),
    ("text_generation_adapter_requests_waiting", "Requests in the queue, by LoRA adapter"),
)


def requests_of_adapters(scheduler: Scheduler) -> tuple[dict[str, int], dict[str, int]]:
    """Return the requests that run and those that wait, by LoRA adapter: each that a replica holds."""
    if not (adapters := scheduler.capacity.adapters):
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
            for name, documentation, field in rows:
                yield reading_text(name, documentation, kind, getattr(stats, field))
        host = self._scheduler.host_caches.figures
        for name, documentation, kind, field in _HOST:
            yield reading_text(f"text_generation_host_cache_{name}", documentation, kind, host[field])
        groups = block_usage(replica.cache for replica in self._scheduler.serving)
        for (name, documentation), number in zip(_GROUPS, (0, 1), strict=True):
            yield head_text(name, documentation, "gauge")
            for group, usage in groups.items() if len(groups) > 1 else ():
                yield f"{name}{labels_text({'group': group})} {usage[number]}.0\n"
        for (name, documentation), counts in zip(_ADAPTERS, requests_of_adapters(self._scheduler), strict=True):
            yield head_text(name, documentation, "gauge")
            yield from (f"{name}{labels_text({'adapter': adapter})} {count}.0\n" for adapter, count in counts.items())
