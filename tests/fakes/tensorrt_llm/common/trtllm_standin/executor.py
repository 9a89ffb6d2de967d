"""Between caller and engine: passes requests on, holds their results, fetches statistics, shuts down.

The library's GenerationExecutorProxy (executor/proxy.py, executor.py), which runs in the caller's process.
"""

from __future__ import annotations

import itertools
import threading
import traceback
from collections import deque
from typing import Any

from trtllm_standin.engine import Engine, Listeners
from trtllm_standin.inspection import Recorder
from trtllm_standin.queues import AsyncQueue, wake_readers
from trtllm_standin.results import (
    EngineDeadError,
    ErrorResponse,
    IterationResult,
    NothingYet,
    RequestError,
    RequestOutput,
)
from trtllm_standin.settings import Settings
from trtllm_standin.worker import Worker
from trtllm_standin.workers import Workers


class GenerationExecutor:
    """Submit, read and abort from one event loop."""

    def __init__(self, engine: Engine, worker: Worker, settings: Settings, recorder: Recorder, *, ranks: int) -> None:
        self.is_known_dead = False
        """The engine has died, and this release notices."""
        self.errors: deque[Exception] = deque()
        """Background errors that no call has raised yet."""
        self._doing_shutdown = False
        self._engine = engine
        self._worker = worker
        self._release = worker.release
        self._settings = settings
        self._recorder = recorder
        self._ids = itertools.count(1)
        # A request that was cancelled while it waited stays here forever (proxy.py).
        self._queues: dict[int, AsyncQueue] = {}
        self._is_dead = False
        self._stats: IterationResult | None = None
        self._shutdown_lock = threading.Lock()
        has_workers = settings.workers and not settings.single_process
        self._workers = Workers(ranks, self._lose_worker) if has_workers else None
        measured = None if self._release.fetches_stats else self._push_stats
        engine.start(Listeners(ended=self._forget, died=self._die, measured=measured))

    def generate_async(
        self,
        prompt_token_ids: list[int],
        sampling_params: Any,  # noqa: ANN401 - SamplingParams of either release
        *,
        streaming: bool,
        cache_salt: str | None,
        description: dict[str, Any],
    ) -> RequestOutput:
        """Submit a request. The worker's errors are raised when it is read, or here if there is no worker process."""
        self.handle_background_error()
        assert isinstance(prompt_token_ids[0], int)  # executor.py: IndexError for an empty prompt
        request_id = next(self._ids)
        result = RequestOutput(request_id, prompt_token_ids, sampling_params, self)
        self._queues[request_id] = result.aqueue
        self._recorder.write("request", id=request_id, prompt=prompt_token_ids, **description)
        self._start_stats()
        try:
            request = self._worker.take(
                request_id, prompt_token_ids, sampling_params, result.aqueue, streaming=streaming, salt=cache_salt
            )
        except Exception as error:
            self._recorder.write("end", id=request_id, reason="error", tokens=0)
            if self._settings.single_process:
                raise RequestError(str(error)) from error
            del self._queues[request_id]
            _put(result.aqueue, ErrorResponse(request_id, str(error), request_id))
        else:
            self._engine.submit(request)
        return result

    def abort_request(self, request_id: int) -> None:
        """Cancel a request; no-op if it has ended."""
        self._recorder.write("abort", id=request_id)
        self._engine.cancel(request_id)

    def is_shutdown(self) -> bool:
        """True after shutdown has begun; a dead worker does not count."""
        return self._doing_shutdown

    def handle_background_error(self) -> None:
        """Raise a background error in the first call that comes, after a shutdown; no other call gets it (executor.py)."""
        if self.errors:
            error = self.errors.popleft()
            self.shutdown()
            raise error

    def aget_stats(self, timeout: float) -> IterationResult | NothingYet:
        """Return statistics. If they are fetched from the worker (PR #9980), this blocks the loop's thread."""
        if self._release.fetches_stats:
            self._start_stats()
        if self._stats is None:
            return NothingYet()
        self._stats.set_timeout(timeout)
        if self._release.fetches_stats and self._engine.statistics is not None:
            self._stats.add(self._engine.statistics.take(timeout))
        return self._stats

    def get_kv_cache_capacity(self) -> dict[str, int]:
        """Return the size of the KV cache."""
        scheduler = self._engine.scheduler
        blocks, size = scheduler.limits.num_blocks, scheduler.limits.block_size
        return {"maxNumBlocks": blocks, "tokensPerBlock": size, "maxNumTokens": blocks * size}

    def shutdown(self) -> None:
        """Abort everything and wait for the engine without a limit (proxy.py, f.result())."""
        with self._shutdown_lock:
            if self._doing_shutdown:
                return
            self._doing_shutdown = True
        self._recorder.write("shutdown", active=self._engine.active, waiting=self._engine.waiting)
        for request_id in list(self._queues):
            self._engine.cancel(request_id)
        self._engine.stop()
        if self._settings.hang_shutdown:
            threading.Event().wait()
        if not self._is_dead:
            self._engine.join()
        if self._workers is not None:
            self._workers.stop()

    def _start_stats(self) -> None:
        """Called at each submission (executor.py, _maybe_initialize_iteration_results)."""
        if self._stats is None:
            self._stats = IterationResult()
        else:
            self._stats.mark_undone()

    def _push_stats(self, entries: list[str]) -> None:
        if self._stats is not None:
            self._stats.add(entries)

    def _forget(self, request_id: int) -> None:
        self._queues.pop(request_id, None)

    def _die(self, error: Exception) -> None:
        traceback.print_exception(error)
        self._is_dead = True
        if not self._release.announces_death:
            self.errors.append(error)
            return
        dead = EngineDeadError(str(error))
        self.is_known_dead = True
        self.errors.append(dead)
        for request_id, queue in list(self._queues.items()):
            self._recorder.write("end", id=request_id, reason="error", tokens=0)
            _put(queue, dead)
        self._queues.clear()

    def _lose_worker(self, rank: int) -> None:
        """A worker process died. Near 1.2.1 nothing notices: readers wait forever, and so does shutdown."""
        self._engine.freeze()
        if self._release.announces_death:
            self._die(RuntimeError(f"worker rank {rank} died"))


def _put(queue: AsyncQueue, item: object) -> None:
    queue.items.append(item)
    wake_readers([queue])
