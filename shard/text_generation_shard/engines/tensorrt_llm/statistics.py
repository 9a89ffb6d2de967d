"""The engine's iteration statistics: KV blocks in use, queued requests, progress, drafted tokens, time of forward passes.

The library returns every entry once, so there is one reader, in a thread of its own. In 1.2 the entries are in a queue of the event
loop on which requests are made, to which they come in batches, up to 0.4 s late. From 1.3 on they are fetched by a remote call, which
blocks the calling thread. Any key may be missing.
"""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from text_generation_common.log import log
from text_generation_shard.engines.tensorrt_llm.library import LLM

POLL_INTERVAL_S = 0.5
POLLS = 4
"""Polls after a step: the next one comes within a second, and the entries of the last one are late."""
POLL_TIMEOUT_S = 0.01
"""Time one poll waits for an entry."""
LOOP_TIMEOUT_S = 30.0
"""Time for the event loop to read its queue; if it takes longer, the loop is blocked, which the watchdog notices."""
FORWARD_KEYS = ("gpuForwardTimeMS", "prevDeviceStepTimeMS", "iterLatencyMS")
"""The time of an iteration, the best measure first: the last one contains the work of the host."""


class IterationStatistics:
    """The latest values. Attributes may be read from any thread."""

    def __init__(self, llm: LLM, loop: asyncio.AbstractEventLoop, *, windows: int = 1, by_call: bool) -> None:
        """`loop` is that of the requests. `windows`: sizes of attention windows. `by_call`: entries are fetched by a remote call."""
        self._llm = llm
        self._loop = loop
        self._by_call = by_call
        self._windows = windows
        self.polls_left = 0
        """Polls until all entries have come; set while requests run."""
        self.iteration = -1
        self.progressed_at = time.monotonic()
        """Time at which a new iteration was last seen."""
        self.queued = 0
        """Requests in the engine's own queue."""
        self.used_blocks = 0
        self.num_blocks = 0
        """KV blocks of the pool: the most that were ever free; 0 if unknown."""
        self.block_size = 0
        self.totals = Counter[str]()
        """Sums over the iterations since the start: `forward_ns` and the fields of Drafting."""
        self._closing = threading.Event()

    def start(self) -> None:
        """Poll at intervals while there are `polls_left`."""
        threading.Thread(target=self._run, name="tensorrt-llm statistics", daemon=True).start()

    def close(self) -> None:
        self._closing.set()

    def poll(self) -> None:
        """Read the entries there are. Called from one thread at a time, not that of the requests."""
        try:
            if entries := self._take():
                self._update(entries)
        except Exception as error:  # noqa: BLE001 - statistics must not fail requests
            log.debug("the engine gave no statistics", reason=f"{type(error).__name__}: {error}")

    def _run(self) -> None:
        while not self._closing.wait(POLL_INTERVAL_S):
            if self.polls_left > 0:
                self.polls_left -= 1
                self.poll()

    def _take(self) -> Sequence[Mapping[str, Any]]:
        if self._by_call:
            entries: Sequence[Mapping[str, Any]] = self._llm.get_stats(timeout=POLL_TIMEOUT_S)
            return entries
        read = _read(self._llm.get_stats_async(timeout=POLL_TIMEOUT_S))
        return asyncio.run_coroutine_threadsafe(read, self._loop).result(LOOP_TIMEOUT_S)

    def _update(self, entries: Sequence[Mapping[str, Any]]) -> None:
        # With attention data parallelism ≥ 1.3 repeats an iteration for each rank.
        entries = [entry for entry in entries if not (entry.get("attentionDpRank") or entry.get("rank"))]
        for entry in entries:
            if (free := self._free_blocks(entry)) is not None:
                self.num_blocks = max(self.num_blocks, free)
                self.used_blocks = self.num_blocks - free
            milliseconds = next((entry[key] for key in FORWARD_KEYS if entry.get(key)), 0)
            drafting = entry.get("specDecodingStats") or {}
            self.totals.update(
                forward_ns=int(milliseconds * 1e6),
                drafts=int(drafting.get("numRequestsWithDraftTokens") or 0),
                draft_tokens=int(drafting.get("numDraftTokens") or 0),
                accepted_tokens=int(drafting.get("numAcceptedTokens") or 0),
            )
        if not entries:
            return
        entry = entries[-1]
        iteration = entry.get("iter", -1)
        if iteration != self.iteration:
            self.iteration, self.progressed_at = iteration, time.monotonic()
        batching = entry.get("inflightBatchingStats") or {}
        self.queued = int(batching.get("numQueuedContextRequests", entry.get("numQueuedRequests")) or 0)
        self.block_size = int((entry.get("kvCacheStats") or {}).get("tokensPerBlock") or 0) or self.block_size

    def _free_blocks(self, entry: Mapping[str, Any]) -> int | None:
        """Return the free blocks on the GPU of the attention window that has the fewest; None if unknown.

        The library's maxNumBlocks includes blocks in host memory, and adds the blocks of all windows, as freeNumBlocks does.
        """
        windows = entry.get("kvCacheIterationStats") or {}
        # Keys below 0 are recurrent states, of which a sequence needs a fixed number.
        pools = [pool for key, pool in windows.items() if key[0] != "-" and "primaryFreeNumBlocks" in pool]
        if pools:
            return min(int(pool["primaryFreeNumBlocks"]) for pool in pools)
        blocks = (entry.get("kvCacheStats") or {}).get("freeNumBlocks")
        return None if blocks is None else int(blocks) // self._windows


async def _read(source: AsyncIterator[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Return the entries there are; those before an error count."""
    if (expect_more := getattr(source, "mark_undone", None)) is not None:
        expect_more()  # a source without an entry in time is at its end, until the next request
    entries: list[Mapping[str, Any]] = []
    try:
        async for entry in source:
            entries.append(entry)
    except Exception:
        if not entries:
            raise
    return entries
