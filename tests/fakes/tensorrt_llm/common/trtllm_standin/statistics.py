"""Iteration statistics, as JSON in the names that the library uses (cpp/tensorrt_llm/executor/jsonSerialization.cpp)."""

from __future__ import annotations

import json
import time
from collections import deque
from typing import Any

from trtllm_standin.scheduler import Batch, Scheduler

POLL_S = 0.1
"""How often the worker looks for entries while a call to it waits (main, rpc_worker.py)."""


class Statistics:
    """The last `capacity` iterations' entries that nobody has fetched yet. An idle engine adds none: what was fetched last
    then tells of the last iteration that had work, and may still count requests as active."""

    def __init__(self, capacity: int, *, detailed: bool) -> None:
        self._entries: deque[str] = deque(maxlen=capacity if capacity >= 0 else None)
        self._detailed = detailed
        self._iteration = 0

    def add(self, scheduler: Scheduler, batch: Batch, *, active: int, unfetched: int, seconds: float) -> None:
        """An entry for an iteration. `active` sequences when it began; `unfetched` requests not even looked at: those that
        wait inside are counted nowhere (py_executor.py near 1.2.1)."""
        self._iteration += 1
        limits = scheduler.limits
        entry = {
            "timestamp": time.strftime("%m-%d-%Y %H:%M:%S"),
            "iter": self._iteration,
            "iterLatencyMS": seconds * 1e3,
            "newActiveRequestsQueueLatencyMS": 0.0,
            "numActiveRequests": active,
            "numQueuedRequests": unfetched,
            "maxNumActiveRequests": limits.max_batch_size,
            "gpuMemUsage": 0,
            "cpuMemUsage": 0,
            "pinnedMemUsage": 0,
            "kvCacheStats": self._kv(scheduler),
            "inflightBatchingStats": self._batching(scheduler, batch),
        }
        if self._detailed:
            entry |= {"hostStepTimeMS": seconds * 1e3, "schedulerMode": "overlap"}
        self._entries.append(json.dumps(entry))

    def take(self, timeout: float = 0.0) -> list[str]:
        """All entries, waiting up to `timeout` seconds for the first. From any thread."""
        deadline = time.monotonic() + timeout
        while not self._entries and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(POLL_S, left))
        entries = []
        while self._entries:
            entries.append(self._entries.popleft())
        return entries

    def _kv(self, scheduler: Scheduler) -> dict[str, Any]:
        pool, cache = scheduler.pool, scheduler.cache
        looked_up = cache.reused + cache.missed
        return {
            "maxNumBlocks": pool.total,
            "freeNumBlocks": pool.total - pool.used,
            "usedNumBlocks": pool.used,
            "tokensPerBlock": pool.block_size,
            "reusedBlocks": cache.reused,
            "missedBlocks": cache.missed,
            "cacheHitRate": cache.reused / looked_up if looked_up else 0.0,
        }

    def _batching(self, scheduler: Scheduler, batch: Batch) -> dict[str, Any]:
        counts: dict[str, Any] = {
            "numScheduledRequests": batch.context_sequences + batch.generation_sequences,
            "numContextRequests": batch.context_sequences,
            "numGenRequests": batch.generation_sequences,
            "numPausedRequests": 0,
            "numCtxTokens": batch.context_tokens,
            "microBatchId": 0,
            "avgNumDecodedTokensPerIter": 0.0,
        }
        if self._detailed:
            counts |= {"numQueuedContextRequests": len(scheduler.waiting), "numQueuedGenRequests": 0}
        return counts
