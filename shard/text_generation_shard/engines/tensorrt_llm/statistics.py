"""What the engine says of its iterations: KV blocks, queue, progress.

`LLM.get_stats_async` hands every entry out once, to whoever asks first, so there is one reader here, on the loop of the
requests. It is no place to rest on: 1.2 has nothing before the first request, waits out its time-out after the last entry, says
nothing more after that until the next request, and raises what its queues raise; a later one blocks the loop while it waits. So
it is asked now and then, for a moment, and what it says last is kept. Every key may be missing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any

import structlog

from text_generation_shard.engines.tensorrt_llm.api import LLM

POLL_S = 0.5
WAIT_S = 0.01
"""How long one look waits for an entry: in some versions it holds up the whole loop."""
MOST_ENTRIES = 2000
"""Entries that one look takes: while the engine runs there may always be one more."""

log = structlog.get_logger()


class Statistics:
    """The latest figures; read them from any thread."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self.iteration = -1
        self.progressed_at = time.monotonic()
        """When an iteration was last seen that had not been seen before."""
        self.queued = 0
        """Requests in the engine's own queue."""
        self.used_blocks = 0
        self.num_blocks = 0
        """KV blocks of the pool; 0: not known yet."""
        self.block_size = 0
        self._reading = False
        self._complained = False

    async def follow(self, is_busy: Callable[[], bool]) -> None:
        """Look now and then, while `is_busy`."""
        while True:
            await asyncio.sleep(POLL_S)
            if is_busy():
                await self.look()
            else:
                self.queued = self.used_blocks = 0  # the last entry is of when it still ran

    async def look(self) -> None:
        """Take what there is."""
        latest: Mapping[str, Any] = {}
        try:
            taken = 0
            try:
                async for entry in self._llm.get_stats_async(timeout=WAIT_S):
                    latest, taken = entry, taken + 1
                    if taken == MOST_ENTRIES:
                        break
            finally:
                if latest:
                    self._take(latest)
        except Exception as error:  # noqa: BLE001 - see the module: figures are not worth a request
            if not self._complained:
                self._complained = True
                log.debug("the engine gave no statistics", reason=f"{type(error).__name__}: {error}")

    def _take(self, entry: Mapping[str, Any]) -> None:
        iteration = entry.get("iter", -1)
        if iteration != self.iteration:
            self.iteration, self.progressed_at = iteration, time.monotonic()
        batching = entry.get("inflightBatchingStats") or {}
        self.queued = int(batching.get("numQueuedContextRequests", entry.get("numQueuedRequests", 0)) or 0)
        blocks = entry.get("kvCacheStats") or {}
        self.used_blocks = int(blocks.get("usedNumBlocks", 0) or 0)
        self.num_blocks = int(blocks.get("maxNumBlocks", 0) or 0) or self.num_blocks
        self.block_size = int(blocks.get("tokensPerBlock", 0) or 0) or self.block_size
