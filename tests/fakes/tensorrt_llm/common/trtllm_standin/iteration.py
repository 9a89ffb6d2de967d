"""What get_stats_async and get_kv_cache_events_async return. 1.2.1: executor/result.py, IterationResult."""

from __future__ import annotations

import json
from queue import Empty
from typing import Any, Self

from trtllm_standin.queues import ends_of, make_queue, wake_readers
from trtllm_standin.results import NO_LOOP

DEFAULT_TIMEOUT_S = 2.0


class IterationResult:
    """Entries as they come, until none has come for `timeout` seconds: the wait is for each entry, so that under load it
    never ends. There is one queue: two readers take each other's entries."""

    __module__ = "tensorrt_llm.executor.result"

    def __init__(self) -> None:
        self._done = False
        self._timeout = DEFAULT_TIMEOUT_S
        self._inlet = make_queue()
        self.aqueue, self.queue = ends_of(self._inlet)

    def set_timeout(self, timeout: float) -> None:
        """Seconds to wait for an entry."""
        self._timeout = timeout

    def mark_undone(self) -> None:
        """Let it be read again. Nothing else does: once it has run dry it stays so, whatever arrives meanwhile."""
        self._done = False

    def get_results(self) -> list[dict[str, Any]]:
        """All entries until none comes for the timeout. A queue that was made on a loop gives None in the place of Empty
        when time runs out, so that this raises TypeError there (llmapi/utils.py)."""
        results = []
        while not self._done:
            try:
                results.append(json.loads(self.queue.get(timeout=self._timeout)))
            except Empty:
                self._done = True
        return results

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> dict[str, Any]:
        if self._done:
            raise StopAsyncIteration
        assert self.aqueue is not None, NO_LOOP
        try:
            entry: dict[str, Any] = json.loads(await self.aqueue.get(timeout=self._timeout))
        except TimeoutError:
            self._done = True
            raise StopAsyncIteration from None
        return entry

    def add(self, entries: list[str]) -> None:
        """Put entries, as JSON. From any thread."""
        for entry in entries:
            self._inlet.append(entry)
        if self.aqueue is not None:
            wake_readers([self.aqueue])


class NothingYet:
    """What is returned in its place before the first request: an iterable with nothing in it, and no set_timeout."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> dict[str, Any]:
        raise StopAsyncIteration
