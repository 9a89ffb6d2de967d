"""Between the caller and the engine: hands requests over, keeps their results, fetches statistics, shuts down.

The library's GenerationExecutorProxy (executor/proxy.py, executor.py), which is in the caller's process.
"""

from __future__ import annotations

import itertools
import json
import logging
import threading
import traceback
from collections import deque
from typing import Any, ClassVar

from trtllm_standin.engine import Engine, Listeners
from trtllm_standin.errors import EngineDeadError, ErrorResponse, RequestError
from trtllm_standin.inspection import Recorder
from trtllm_standin.iteration import IterationResult, NothingYet
from trtllm_standin.queues import AnyQueue, AsyncQueue, wake_readers
from trtllm_standin.results import GenerationResult, TimedGenerationResult
from trtllm_standin.settings import Settings
from trtllm_standin.terms import Worker
from trtllm_standin.workers import Workers

log = logging.getLogger(__name__)
NOT_YET = (
    "Iteration statistics are not available yet. To collect runtime statistics, please call get_stats() AFTER prompts "
    "have been submitted."
)


class GenerationExecutor:
    """As near 1.2.1. Submit, read and abort from one event loop."""

    result_class: ClassVar[type[GenerationResult]] = GenerationResult

    def __init__(
        self,
        engine: Engine,
        worker: Worker,
        settings: Settings,
        recorder: Recorder,
        *,
        ranks: int,
        uses_trtllm_sampler: bool,
    ) -> None:
        self.uses_trtllm_sampler = uses_trtllm_sampler
        self.doing_shutdown = False
        self._engine = engine
        self._worker = worker
        self._settings = settings
        self._recorder = recorder
        self._fetches_stats = (settings.stats or worker.release.stats) == "rpc"
        self._ids = itertools.count(1)
        # Every request until its last item; one that was cancelled while it waited stays for ever (proxy.py).
        self._results: dict[int, AnyQueue] = {}
        self.errors: deque[Exception] = deque()
        """What happened behind the callers' backs, and none has been told."""
        self._is_dead = False
        self._iter_stats_result: IterationResult | None = None
        self._shutdown_lock = threading.Lock()
        if settings.single_process:
            # worker.py: only without a worker process can the effective length be read.
            self.engine = engine
            self.max_seq_len = engine.scheduler.limits.max_seq_len
        has_workers = settings.workers and not settings.single_process
        self._workers = Workers(ranks, self._lose_worker) if has_workers else None
        engine.start(
            Listeners(
                ended=self._forget,
                died=self._die,
                measured=None if self._fetches_stats else self._keep_statistics,
            )
        )

    def generate_async(
        self,
        prompt_token_ids: list[int],
        sampling_params: Any,  # noqa: ANN401 - SamplingParams of either release
        *,
        streaming: bool,
        trace_headers: Any = None,  # noqa: ANN401 - passed through
        cache_salt: str | None = None,
        priority: float = 0.5,
        description: dict[str, Any] | None = None,
    ) -> GenerationResult:
        """Submit a request. What is wrong with it shows when its result is read, unless there is no worker process.
        `description` is for the record only."""
        self.handle_background_error()
        # executor.py: an IndexError for an empty prompt, an AssertionError for numpy's integers.
        assert isinstance(prompt_token_ids[0], int)
        request_id = next(self._ids)
        result = self.result_class(request_id, prompt_token_ids, sampling_params, self, trace_headers=trace_headers)
        queue = result.inlet
        self._results[request_id] = queue
        self._recorder.write("request", id=request_id, prompt=prompt_token_ids, **(description or {}))
        self._start_statistics()
        try:
            request = self._worker.take(
                request_id,
                prompt_token_ids,
                sampling_params,
                queue,
                streaming=streaming,
                salt=cache_salt,
                priority=priority,
            )
        except Exception as error:
            self._recorder.write("end", id=request_id, reason="error", tokens=0)
            if self._settings.single_process:
                raise RequestError(str(error)) from error  # and its entry in _results stays
            del self._results[request_id]
            put(queue, ErrorResponse(request_id, str(error), request_id))
        else:
            self._engine.submit(request)
        return result

    def abort_request(self, request_id: int) -> None:
        """Ask for a request's end. One that has ended, or never was, is let be: nothing is answered."""
        self._recorder.write("abort", id=request_id)
        self._engine.cancel(request_id)

    def is_shutdown(self) -> bool:
        """Whether shutdown has begun. Says nothing of a dead worker."""
        return self.doing_shutdown

    def handle_background_error(self) -> None:
        """Raise what happened behind the caller's back, once: the first to come here gets it, whatever they ask, and the
        executor is shut down before. The others hear nothing (executor.py, _handle_background_error)."""
        if self.errors:
            error = self.errors.popleft()
            self.shutdown()
            raise error

    def get_stats(self, timeout: float) -> list[dict[str, Any]]:
        """Entries of iterations since the last call."""
        if self._fetches_stats:
            return [json.loads(entry) for entry in self._fetch_statistics(timeout)]
        if self._iter_stats_result is None:
            log.warning(NOT_YET)
            return []
        self._iter_stats_result.set_timeout(timeout)
        return self._iter_stats_result.get_results()

    def aget_stats(self, timeout: float) -> IterationResult | NothingYet:
        """The same as an asynchronous iterable.

        Fetched by a call to the worker (PR #9980), the entries are waited for in here, in the loop's thread; the iteration
        then waits the timeout again.
        """
        if self._fetches_stats:
            self._start_statistics()
        if self._iter_stats_result is None:
            log.warning(NOT_YET)
            return NothingYet()
        self._iter_stats_result.set_timeout(timeout)
        if self._fetches_stats:
            self._iter_stats_result.add(self._fetch_statistics(timeout))
        return self._iter_stats_result

    def get_kv_events(self, timeout: float) -> list[dict[str, Any]]:
        """None are made: the stand-in's cache has no events."""
        return []

    def aget_kv_events(self, timeout: float) -> NothingYet:
        """See get_kv_events."""
        return NothingYet()

    def shutdown(self) -> None:
        """Abort everything and wait for the engine, without a limit: a stuck one makes this hang (proxy.py, f.result())."""
        with self._shutdown_lock:
            if self.doing_shutdown:
                return
            self.doing_shutdown = True
        self._recorder.write("shutdown", active=self._engine.active, waiting=self._engine.waiting)
        for request_id in list(self._results):
            self._engine.cancel(request_id)
        self._engine.stop()
        if self._settings.hang_shutdown:
            threading.Event().wait()
        if not self._is_dead:
            self._engine.join()
        if self._workers is not None:
            self._workers.stop()

    def _fetch_statistics(self, timeout: float) -> list[str]:
        statistics = self._engine.statistics
        return [] if statistics is None else statistics.take(timeout)

    def _start_statistics(self) -> None:
        """At each submission (executor.py, _maybe_initialize_iteration_results); bound to the loop of the first."""
        if self._iter_stats_result is None:
            self._iter_stats_result = IterationResult()
        else:
            self._iter_stats_result.mark_undone()

    def _keep_statistics(self, entries: list[str]) -> None:
        if self._iter_stats_result is not None:
            self._iter_stats_result.add(entries)

    def _forget(self, request_id: int) -> None:
        self._results.pop(request_id, None)

    def _die(self, error: Exception) -> None:
        """The engine is gone. Nobody who waits is told."""
        traceback.print_exception(error)
        self._is_dead = True
        self.errors.append(error)

    def _lose_worker(self, rank: int) -> None:
        """A worker process is gone. Near 1.2.1 nothing notices: readers wait for ever, and so does shutdown."""
        self._engine.freeze()


class NewerExecutor(GenerationExecutor):
    """As in main: the death of a worker is noticed, and there is a way to ask."""

    result_class = TimedGenerationResult

    def check_health(self) -> bool:
        """Whether it can still serve (PR #12718)."""
        return not self.doing_shutdown and not self._is_dead

    def get_kv_cache_capacity(self) -> dict[str, int]:
        """Size of the KV cache, on the GPU."""
        pool = self._engine.scheduler.pool
        return {
            "maxNumBlocks": pool.total,
            "tokensPerBlock": pool.block_size,
            "maxNumTokens": pool.total * pool.block_size,
        }

    def _die(self, error: Exception) -> None:
        """Every pending result raises EngineDeadError (PR #15816), and so does the next submission."""
        dead = EngineDeadError(str(error))
        super()._die(dead)
        for request_id, queue in list(self._results.items()):
            self._recorder.write("end", id=request_id, reason="error", tokens=0)
            put(queue, dead)
        self._results.clear()

    def _lose_worker(self, rank: int) -> None:
        self._engine.freeze()
        self._die(RuntimeError(f"worker rank {rank} died"))


def put(queue: AnyQueue, item: object) -> None:
    """Give a reader an item."""
    queue.append(item)
    if isinstance(queue, AsyncQueue):
        wake_readers([queue])
