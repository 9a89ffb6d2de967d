"""Between caller and engine: passes requests on, holds their results, fetches statistics, shuts down.

The library's GenerationExecutorProxy (executor/proxy.py, executor.py), which runs in the caller's process.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
import traceback
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

from trtllm_standin.engine import Engine, put
from trtllm_standin.inspection import Recorder
from trtllm_standin.release import Release
from trtllm_standin.results import EngineDeadError, ErrorResponse, RequestError, RequestOutput
from trtllm_standin.sequences import Sequence
from trtllm_standin.settings import Settings
from trtllm_standin.workers import Workers

REMOTE_POLL_S = 0.1
"""Time that a remote call for statistics takes if there are none."""


class GenerationExecutor:
    """Submit, read and abort from one event loop."""

    def __init__(
        self,
        engine: Engine,
        release: Release,
        settings: Settings,
        recorder: Recorder,
        *,
        ranks: int,
        keeps_events: bool = False,
    ) -> None:
        self.is_known_dead = False
        """The engine has died, and this release notices."""
        self._errors: deque[Exception] = deque()
        """Background errors that no call has raised yet."""
        self._doing_shutdown = False
        self._engine = engine
        self._release = release
        self._settings = settings
        self._recorder = recorder
        self._ids = itertools.count(1)
        # A request that was cancelled while it waited stays here forever (proxy.py).
        self._results: dict[int, RequestOutput] = {}
        self.events: list[int] = []
        self._keeps_events = keeps_events
        self._loop: asyncio.AbstractEventLoop
        self._thread: threading.Thread | None = None
        """The thread that makes requests."""
        self._is_dead = False
        self._has_stats = False
        self._shutdown_lock = threading.Lock()
        has_workers = settings.workers and not settings.single_process
        self._workers = Workers(ranks, self._lose_worker) if has_workers else None
        engine.start(lambda request_id: self._results.pop(request_id, None), self._die)

    def generate_async(
        self,
        prompt: list[int],
        make: Callable[[RequestOutput], Sequence],
        *,
        keeps_stop: bool,
        description: dict[str, Any],
    ) -> RequestOutput:
        """Submit a request. The errors of `make` are raised when it is read, or here if there is no worker process."""
        self._raise_background_error()
        self._loop, self._thread = asyncio.get_running_loop(), threading.current_thread()
        request_id = next(self._ids)
        result = RequestOutput(request_id, keeps_stop, self._abort, self._raise_background_error)
        self._results[request_id] = result
        self._recorder.write("request", id=request_id, prompt=prompt, **description)
        self._has_stats = True
        if self._release.keeps_events and self._keeps_events:
            self.events.append(request_id)
        try:
            sequence = make(result)
        except Exception as error:
            self._recorder.write("end", id=request_id, reason="error", tokens=0)
            if self._settings.single_process:
                raise RequestError(str(error)) from error
            put([(self._results.pop(request_id), ErrorResponse(request_id, str(error), request_id))])
        else:
            self._engine.submit(sequence)
        return result

    def _abort(self, request_id: int) -> None:
        self._recorder.write("abort", id=request_id)
        self._engine.cancel(request_id)

    def is_shutdown(self) -> bool:
        """True after shutdown has begun; a dead worker does not count."""
        return self._doing_shutdown

    def _raise_background_error(self) -> None:
        """Raise a background error in the first call that comes, after a shutdown; no other call gets it (executor.py)."""
        if self._errors:
            error = self._errors.popleft()
            self.shutdown()
            raise error

    def fetch_stats(self) -> list[dict[str, Any]]:
        """Take the statistics by a remote call, which blocks this thread."""
        if threading.current_thread() is self._thread:
            self._recorder.write("blocked")
        entries = self._engine.statistics
        if not entries:
            time.sleep(REMOTE_POLL_S)
        return [entries.popleft() for _ in range(len(entries))]

    async def stats(self, timeout: float) -> AsyncIterator[dict[str, Any]]:
        """Yield the statistics there are. At first, and once none has come for `timeout` seconds, none until the next request."""
        if self._release.blocks_for_stats:
            for entry in self.fetch_stats():
                yield entry
            return
        entries = self._engine.statistics
        if self._has_stats:
            for _ in range(len(entries)):
                yield entries.popleft()
            await asyncio.sleep(timeout)
            self._has_stats = bool(entries)

    def fetch_events(self) -> list[Any]:
        """Take the events of the KV cache. Near 1.2.1 each is in a list of its own (test_llm_multi_gpu.py)."""
        if self._release.blocks_for_stats and threading.current_thread() is self._thread:
            self._recorder.write("blocked")
        self.events.clear()
        found = self._engine.prefixes.events
        if taken := [found.popleft() for _ in range(len(found))]:
            self._recorder.write("events", number=len(taken))
        return [[event] for event in taken] if self._release.keeps_events else taken

    async def kv_events(self, timeout: float) -> AsyncIterator[Any]:
        """Yield the events of the KV cache there are."""
        for event in self.fetch_events():
            yield event
        await asyncio.sleep(timeout)

    def get_kv_cache_capacity(self) -> dict[str, int]:
        """Return the size of the KV cache."""
        blocks, size = self._engine.limits.num_blocks, self._engine.limits.block_size
        return {"maxNumBlocks": blocks, "tokensPerBlock": size, "maxNumTokens": blocks * size}

    def shutdown(self) -> None:
        """Abort everything and wait for the engine without a limit (proxy.py, f.result())."""
        with self._shutdown_lock:
            if self._doing_shutdown:
                return
            self._doing_shutdown = True
        self._recorder.write("shutdown")
        for request_id in list(self._results):
            self._engine.cancel(request_id)
        self._engine.stop()
        if self._settings.hang_shutdown:
            threading.Event().wait()
        if not self._is_dead:
            self._engine.join()
        if self._workers is not None:
            self._workers.stop()

    def _die(self, error: Exception) -> None:
        traceback.print_exception(error)
        self._is_dead = True
        if not self._release.announces_death:
            self._errors.append(error)
            return
        dead = EngineDeadError(str(error))
        self.is_known_dead = True
        self._errors.append(dead)
        for request_id in self._results:
            self._recorder.write("end", id=request_id, reason="error", tokens=0)
        if self._results:
            self._loop.call_soon_threadsafe(put, [(result, dead) for result in self._results.values()])
        self._results.clear()

    def _lose_worker(self, rank: int) -> None:
        """A worker process died. Near 1.2.1 nothing notices: readers wait forever, and so does shutdown."""
        self._engine.freeze()
        if self._release.announces_death:
            self._die(RuntimeError(f"worker rank {rank} died"))
