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
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

from trtllm_standin.engine import Engine, put
from trtllm_standin.inspection import Recorder
from trtllm_standin.release import Release
from trtllm_standin.results import EngineDeadError, ErrorResponse, IterationResult, RequestError, RequestOutput
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
        self._loop: asyncio.AbstractEventLoop
        self._thread: threading.Thread | None = None
        """The thread that makes requests."""
        self._is_dead = False
        self._stats: IterationResult | None = None
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
        if not self._release.blocks_for_stats:
            self._expect_stats()
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
        # proxy.py: a ZeroMQ socket, which two threads must not use at once; shutdown sends on it too.
        self._recorder.write("raced" if self._doing_shutdown else "abort", id=request_id)
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

    def stats(self, timeout: float) -> AsyncIterator[dict[str, Any]]:
        """Return the statistics: 1.2.1 has none before the first request (executor.py, aget_stats)."""
        if self._release.blocks_for_stats:
            return _each(self.fetch_stats())
        if self._stats is None:
            return _each(())
        self._stats.set_timeout(timeout)
        return self._stats

    def _expect_stats(self) -> None:
        """Called for each request (_maybe_initialize_iteration_results; the thread is started with the first, proxy.py)."""
        if self._stats is None:
            self._stats = IterationResult()
            threading.Thread(target=self._dispatch_stats, args=(self._stats,), daemon=True).start()
        self._stats.mark_undone()

    def _dispatch_stats(self, result: IterationResult) -> None:
        """Hand the entries over in batches, as they are not urgent (proxy.py, _iteration_result_task)."""
        entries = self._engine.statistics
        while not self._doing_shutdown:
            time.sleep(self._settings.stats_ms / 1e3)
            batch = [entries.popleft() for _ in range(len(entries))]
            try:
                self._loop.call_soon_threadsafe(lambda batch=batch: [result.queue.put_nowait(each) for each in batch])
            except RuntimeError:  # the loop is closed
                return

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


async def _each(entries: Iterable[dict[str, Any]]) -> AsyncIterator[dict[str, Any]]:
    for entry in entries:
        yield entry
