"""The engine's iteration statistics: KV blocks in use, queued requests, progress.

`LLM.get_stats_async` returns every entry once, so there is one reader, on the event loop of the requests. The call is fragile. In 1.2
it returns nothing before the first request, waits for its timeout after the last entry, then returns nothing until the next request,
and raises the errors of its queues; later versions block the loop while they wait. So it is polled for a short time at intervals,
and the last values are kept. Any key may be missing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any

import structlog

from text_generation_shard.engines.tensorrt_llm.api import LLM

POLL_INTERVAL_S = 0.5
POLL_TIMEOUT_S = 0.01
"""Time one poll waits for an entry; some versions block the loop meanwhile."""
MAX_ENTRIES = 2000
"""Entries read in one poll; while the engine runs there may always be another."""

log = structlog.get_logger()


class IterationStatistics:
    """The latest values. Attributes may be read from any thread."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self.iteration = -1
        self.progressed_at = time.monotonic()
        """Time at which a new iteration was last seen."""
        self.queued = 0
        """Requests in the engine's own queue."""
        self.used_blocks = 0
        self.num_blocks = 0
        """KV blocks of the pool; 0 if unknown."""
        self.block_size = 0
        self._logged_error = False

    async def run(self, is_busy: Callable[[], bool]) -> None:
        """Poll at intervals while `is_busy`; never returns."""
        while True:
            await asyncio.sleep(POLL_INTERVAL_S)
            if is_busy():
                await self.poll()
            else:
                self.queued = self.used_blocks = 0  # the last entry describes a busy iteration

    async def poll(self) -> None:
        """Read the entries there are and keep the last one."""
        latest: Mapping[str, Any] = {}
        try:
            count = 0
            try:
                async for entry in self._llm.get_stats_async(timeout=POLL_TIMEOUT_S):
                    latest, count = entry, count + 1
                    if count == MAX_ENTRIES:
                        break
            finally:
                if latest:
                    self._update(latest)
        except Exception as error:  # noqa: BLE001 - statistics must not fail requests
            if not self._logged_error:
                self._logged_error = True
                log.debug("the engine gave no statistics", reason=f"{type(error).__name__}: {error}")

    def _update(self, entry: Mapping[str, Any]) -> None:
        iteration = entry.get("iter", -1)
        if iteration != self.iteration:
            self.iteration, self.progressed_at = iteration, time.monotonic()
        batching = entry.get("inflightBatchingStats") or {}
        self.queued = int(batching.get("numQueuedContextRequests", entry.get("numQueuedRequests", 0)) or 0)
        blocks = entry.get("kvCacheStats") or {}
        self.used_blocks = int(blocks.get("usedNumBlocks", 0) or 0)
        self.num_blocks = int(blocks.get("maxNumBlocks", 0) or 0) or self.num_blocks
        self.block_size = int(blocks.get("tokensPerBlock", 0) or 0) or self.block_size
