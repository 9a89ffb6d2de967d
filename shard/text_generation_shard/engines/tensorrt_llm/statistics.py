"""The engine's iteration statistics: KV blocks in use, queued requests, progress, drafted tokens, time of forward passes.

The library returns every entry once, so there is one reader, in a thread of its own. In 1.2 the entries are in a queue of the event
loop on which requests are made: it is empty before the first request, and after the last entry until the next request. From 1.3
on they are fetched by a remote call, which blocks the calling thread. Any key may be missing.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from text_generation_shard.engines.tensorrt_llm.api import LLM
from text_generation_shard.threads import daemon_thread

POLL_INTERVAL_S = 0.5
POLL_TIMEOUT_S = 0.01
"""Time one poll waits for an entry."""
LOOP_TIMEOUT_S = 30.0
"""Time for the event loop to read its queue; if it takes longer, the loop is blocked, which the watchdog notices."""
MAX_ENTRIES = 2000
"""Entries read in one poll; while the engine runs there may always be another."""
FORWARD_KEYS = ("gpuForwardTimeMS", "prevDeviceStepTimeMS", "iterLatencyMS")
"""The time of an iteration, the best measure first: the last one contains the work of the host."""

log = structlog.get_logger()


@dataclass(slots=True)
class Totals:
    """Sums over iterations. The reader of the statistics adds, one other thread subtracts what it has reported."""

    forward_ns: int = 0
    drafts: int = 0
    """Steps of a sequence in which tokens were drafted."""
    draft_tokens: int = 0
    accepted_tokens: int = 0


class IterationStatistics:
    """The latest values. Attributes may be read from any thread."""

    def __init__(
        self, llm: LLM, loop: asyncio.AbstractEventLoop, is_busy: Callable[[], bool], *, by_call: bool
    ) -> None:
        """`loop` is that of the requests. `by_call`: the library fetches the entries by a remote call."""
        self.events: Callable[[Sequence[Any]], None] | None = None
        """Gets the events of the KV cache; None if the engine keeps none. Called from the thread of this object."""
        self._llm = llm
        self._loop = loop
        self._is_busy = is_busy
        self._by_call = by_call
        self.iteration = -1
        self.progressed_at = time.monotonic()
        """Time at which a new iteration was last seen."""
        self.queued = 0
        """Requests in the engine's own queue."""
        self.used_blocks = 0
        self.num_blocks = 0
        """KV blocks of the pool; 0 if unknown."""
        self.block_size = 0
        self.totals = Totals()
        """Since the start."""
        self._logged_error = False
        self._closing = threading.Event()
        self._thread = daemon_thread(self._run, "tensorrt-llm statistics")

    def start(self) -> None:
        """Poll at intervals while requests run."""
        self._thread.start()

    def close(self) -> None:
        """Stop polling."""
        self._closing.set()

    def poll(self) -> None:
        """Read the entries there are. Called from one thread at a time, not that of the requests."""
        try:
            if entries := self._take("get_stats"):
                self._update(entries)
            if self.events is not None:
                self.events(self._take("get_kv_cache_events"))
        except Exception as error:  # noqa: BLE001 - statistics must not fail requests
            if not self._logged_error:
                self._logged_error = True
                log.debug("the engine gave no statistics", reason=f"{type(error).__name__}: {error}")

    def _run(self) -> None:
        was_busy = False
        while not self._closing.wait(POLL_INTERVAL_S):
            is_busy = self._is_busy()
            if is_busy or was_busy or self.events is not None:
                self.poll()
            if not is_busy:
                self.queued = self.used_blocks = 0  # the last entry describes a busy iteration
            was_busy = is_busy

    def _take(self, method: str) -> Sequence[Any]:
        """Return the entries that a method of the library has, or its asynchronous form."""
        if self._by_call:
            taken: Sequence[Any] = getattr(self._llm, method)(timeout=POLL_TIMEOUT_S)
            return taken
        read = _read(getattr(self._llm, f"{method}_async")(timeout=POLL_TIMEOUT_S))
        return asyncio.run_coroutine_threadsafe(read, self._loop).result(LOOP_TIMEOUT_S)

    def _update(self, entries: Sequence[Mapping[str, Any]]) -> None:
        # With attention data parallelism ≥ 1.3 repeats an iteration for each rank.
        entries = [entry for entry in entries if not entry.get("attentionDpRank")]
        for entry in entries:
            milliseconds = next((entry[key] for key in FORWARD_KEYS if entry.get(key)), 0)
            self.totals.forward_ns += int(milliseconds * 1e6)
            drafting = entry.get("specDecodingStats") or {}
            self.totals.drafts += int(drafting.get("numRequestsWithDraftTokens", 0) or 0)
            self.totals.draft_tokens += int(drafting.get("numDraftTokens", 0) or 0)
            self.totals.accepted_tokens += int(drafting.get("numAcceptedTokens", 0) or 0)
        if not entries:
            return
        entry = entries[-1]
        iteration = entry.get("iter", -1)
        if iteration != self.iteration:
            self.iteration, self.progressed_at = iteration, time.monotonic()
        batching = entry.get("inflightBatchingStats") or {}
        self.queued = int(batching.get("numQueuedContextRequests", entry.get("numQueuedRequests", 0)) or 0)
        blocks = entry.get("kvCacheStats") or {}
        self.used_blocks = int(blocks.get("usedNumBlocks", 0) or 0)
        self.num_blocks = int(blocks.get("maxNumBlocks", 0) or 0) or self.num_blocks
        self.block_size = int(blocks.get("tokensPerBlock", 0) or 0) or self.block_size


async def _read(source: AsyncIterator[Any]) -> Sequence[Any]:
    """Return the entries there are; those before an error count."""
    entries: list[Any] = []
    try:
        async for entry in source:
            entries.append(entry)
            if len(entries) == MAX_ENTRIES:
                break
    except Exception:
        if not entries:
            raise
    return entries
