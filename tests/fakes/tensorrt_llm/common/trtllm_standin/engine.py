"""The engine's loop in its own thread: fetch, schedule, compute, answer. Near 1.2.1: py_executor.py."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue

from trtllm_standin.inspection import Recorder
from trtllm_standin.queues import AsyncQueue, wake_readers
from trtllm_standin.release import Release
from trtllm_standin.results import ErrorResponse, FinishReason, Response
from trtllm_standin.scheduler import Batch, Limits, Scheduler
from trtllm_standin.sequences import Sequence, StepFault
from trtllm_standin.settings import Fault, Settings
from trtllm_standin.statistics import Statistics

STATS_INTERVAL_S = 0.2
"""Interval at which statistics leave the worker (near 1.2.1: worker.py, dispatch_stats)."""


@dataclass(frozen=True, slots=True)
class Cancel:
    """Message: end this request."""

    request_id: int


@dataclass(frozen=True, slots=True)
class Listeners:
    """Callbacks; the engine's thread calls them."""

    ended: Callable[[int], None]
    """A request got its last item."""
    died: Callable[[Exception], None]
    """The engine died."""
    measured: Callable[[list[str]], None] | None
    """Statistics; None: they are fetched."""


class Engine:
    """Runs sequences. `submit`, `cancel` and `stop` may be called from any thread."""

    def __init__(
        self, limits: Limits, settings: Settings, release: Release, recorder: Recorder, statistics: Statistics | None
    ) -> None:
        self.scheduler = Scheduler(limits)
        self.statistics = statistics
        self._listeners: Listeners
        self._settings = settings
        self._release = release
        self._recorder = recorder
        self._inbox: SimpleQueue[Sequence | Cancel | None] = SimpleQueue()
        self._sequences: dict[int, Sequence] = {}
        self._cancelled: set[int] = set()
        self._wake: list[AsyncQueue] = []
        self._is_stopping = False
        self._is_blocked = False
        self._is_frozen = False
        self._published = 0.0
        self._thread = threading.Thread(target=self._run, name="trtllm-standin", daemon=True)

    def start(self, listeners: Listeners) -> None:
        """Start the loop."""
        self._listeners = listeners
        self._thread.start()

    def submit(self, sequence: Sequence) -> None:
        """Add a sequence."""
        self._inbox.put(sequence)

    def cancel(self, request_id: int) -> None:
        """Cancel a request; no-op if unknown."""
        self._inbox.put(Cancel(request_id))

    def stop(self) -> None:
        """End the loop once nothing is left to do."""
        self._inbox.put(None)

    def join(self) -> None:
        """Wait for the end of the loop, without a limit."""
        self._thread.join()

    def freeze(self) -> None:
        """Produce nothing any more, as after the unnoticed death of a worker process."""
        self._is_frozen = True

    @property
    def active(self) -> int:
        """Number of active sequences."""
        return len(self.scheduler.active)

    @property
    def waiting(self) -> int:
        """Number of sequences that are not active yet."""
        return len(self.scheduler.waiting) + self._inbox.qsize()

    def _run(self) -> None:
        while self._iterate():
            wake_readers(self._wake)
            self._wake.clear()
        wake_readers(self._wake)

    def _iterate(self) -> bool:
        """Run one iteration; return False if it was the last."""
        scheduler = self.scheduler
        self._fetch(wait=self._is_blocked or (scheduler.is_idle and not self._is_stopping))
        if self._is_frozen:
            threading.Event().wait()
        if self._is_stopping and scheduler.is_idle:
            return False
        for sequence, problem in scheduler.activate():
            self._fail([sequence], problem)
        started, active = time.perf_counter(), len(scheduler.active)
        batch = scheduler.schedule()
        # Without a batch nothing is cancelled either: _handle_canceled_requests runs only under can_queue.
        self._is_blocked = not batch and not scheduler.is_idle
        if not batch:
            return True
        self._pause(batch, started)
        count, interval = self._settings.tokens_per_step, scheduler.limits.stream_interval
        try:
            responses = [sequence.step(count, interval) for sequence in batch.sampling]
        except StepFault as fault:
            return self._fail_step(fault)
        self._respond(batch.sampling, responses)
        if self._cancelled:
            self._handle_cancels()
        self._measure(batch, active, started)
        return True

    def _fetch(self, *, wait: bool) -> None:
        """Empty the inbox; with `wait`, wait for a message first."""
        if wait:
            self._receive(self._inbox.get())
        while not self._inbox.empty():
            self._receive(self._inbox.get())

    def _receive(self, message: Sequence | Cancel | None) -> None:
        match message:
            case None:
                self._is_stopping = True
            case Cancel(request_id):
                self._cancelled.add(request_id)
            case _:
                self._sequences[message.request.id] = message
                self.scheduler.waiting.append(message)

    def _pause(self, batch: Batch, started: float) -> None:
        """Take the time that the step shall take; at least yield to other threads."""
        pace = (self._settings.step_ms + self._settings.prefill_us * batch.context_tokens / 1e3) / 1e3
        time.sleep(max(started + pace - time.perf_counter(), 0.0))

    def _handle_cancels(self) -> None:
        """Cancel after the step; a sequence that ended in it has ended by itself.

        A request that is not active is dropped from the queue without an item, so its reader waits forever (py_executor.py,
        update_waiting_queue).
        """
        with_token = self._settings.cancel_with_token and self._release.lacks_cancelled_logprobs
        for request_id in self._cancelled:
            sequence = self._sequences.get(request_id)
            if sequence is None:
                continue
            if sequence in self.scheduler.waiting:
                self.scheduler.waiting.remove(sequence)
                del self._sequences[request_id]
                self._recorder.write("end", id=request_id, reason="dropped", tokens=0)
            else:
                self._respond([sequence], [sequence.cancel(with_token=with_token)])
        self._cancelled.clear()

    def _respond(self, sequences: list[Sequence], responses: list[Response | None]) -> None:
        """Deliver the items of an iteration."""
        ended = []
        for sequence, response in zip(sequences, responses, strict=True):
            if response is None:
                if sequence.error is not None:
                    self._fail([sequence], sequence.error)
                continue
            self._deliver(sequence, response)
            if response.finish is not None:
                ended.append(sequence)
                is_stop = response.finish is FinishReason.STOP_WORDS
                self._forget(sequence, "stop" if is_stop else response.finish.value)
        if ended:
            self.scheduler.end(ended)

    def _fail(self, sequences: list[Sequence], message: str) -> None:
        """Deliver an error to each sequence and free its blocks (_handle_errors)."""
        self.scheduler.end(sequences)
        for sequence in sequences:
            request_id = sequence.request.id
            self._deliver(sequence, ErrorResponse(request_id, message, request_id))
            self._forget(sequence, "error")

    def _deliver(self, sequence: Sequence, item: object) -> None:
        queue = sequence.request.queue
        queue.items.append(item)
        self._wake.append(queue)

    def _forget(self, sequence: Sequence, reason: str) -> None:
        request_id = sequence.request.id
        del self._sequences[request_id]
        self._listeners.ended(request_id)
        self._recorder.write("end", id=request_id, reason=reason, tokens=len(sequence.generated))

    def _fail_step(self, fault: StepFault) -> bool:
        """Handle a failed step; return False if the loop ends."""
        if fault.fault is Fault.HANG:
            wake_readers(self._wake)
            threading.Event().wait()
        if fault.fault is Fault.FATAL:
            self._listeners.died(RuntimeError(str(fault)))
            return False
        # _handle_errors fails all active requests with the same text. Waiting ones go on – or, with the overlap scheduler,
        # wait forever: its loop ends with "assert sample_state is not None".
        self._fail(list(self.scheduler.active), str(fault))
        return not self._settings.step_fail_ends

    def _measure(self, batch: Batch, active: int, started: float) -> None:
        if self.statistics is None:
            return
        now = time.perf_counter()
        self.statistics.add(self.scheduler, batch, active=active, unfetched=self._inbox.qsize(), seconds=now - started)
        publish = self._listeners.measured
        if publish is not None and (self.scheduler.is_idle or now - self._published >= STATS_INTERVAL_S):
            self._published = now
            publish(self.statistics.take())
