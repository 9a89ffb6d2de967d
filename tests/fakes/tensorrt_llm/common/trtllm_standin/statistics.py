"""Iteration statistics as JSON, with the library's keys (cpp/tensorrt_llm/executor/jsonSerialization.cpp)."""

from __future__ import annotations

import json
import time
from collections import deque

from trtllm_standin.scheduler import Batch, Scheduler

MAX_ENTRIES = 1000
"""Default of max_stats_len."""
POLL_S = 0.1
"""Interval at which the worker looks for entries while a call waits (main, rpc_worker.py)."""


class Statistics:
    """The entries that have not been fetched. An idle engine adds none, so the last entry describes a busy iteration."""

    def __init__(self, *, detailed: bool) -> None:
        self._entries: deque[str] = deque(maxlen=MAX_ENTRIES)
        self._detailed = detailed
        self._iteration = 0

    def add(self, scheduler: Scheduler, batch: Batch, *, active: int, unfetched: int, seconds: float) -> None:
        """Add the entry of an iteration, with the `active` sequences at its start and the `unfetched` messages."""
        self._iteration += 1
        limits = scheduler.limits
        batching = {
            "numScheduledRequests": batch.context_sequences + batch.generation_sequences,
            "numContextRequests": batch.context_sequences,
            "numGenRequests": batch.generation_sequences,
            "numPausedRequests": 0,
            "numCtxTokens": batch.context_tokens,
            "microBatchId": 0,
            "avgNumDecodedTokensPerIter": 0.0,
        }
        if self._detailed:
            batching |= {"numQueuedContextRequests": len(scheduler.waiting), "numQueuedGenRequests": 0}
        entry = {
            "timestamp": time.strftime("%m-%d-%Y %H:%M:%S"),
            "iter": self._iteration,
            "iterLatencyMS": seconds * 1e3,
            "numActiveRequests": active,
            "numQueuedRequests": unfetched,  # waiting sequences are not counted (py_executor.py near 1.2.1)
            "maxNumActiveRequests": limits.max_batch_size,
            "kvCacheStats": {
                "maxNumBlocks": limits.num_blocks,
                "freeNumBlocks": limits.num_blocks - scheduler.used_blocks,
                "usedNumBlocks": scheduler.used_blocks,
                "tokensPerBlock": limits.block_size,
            },
            "inflightBatchingStats": batching,
        }
        self._entries.append(json.dumps(entry))

    def take(self, timeout: float = 0.0) -> list[str]:
        """Return and remove all entries; wait up to `timeout` seconds for the first. May be called from any thread."""
        deadline = time.monotonic() + timeout
        while not self._entries and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(POLL_S, left))
        entries = []
        while self._entries:
            entries.append(self._entries.popleft())
        return entries
