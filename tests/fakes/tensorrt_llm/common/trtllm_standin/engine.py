"""The engine's loop, in a daemon thread of its own: fetch, schedule, compute, answer. Near 1.2.1: py_executor.py."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue

from trtllm_standin.errors import ErrorResponse
from trtllm_standin.inspection import Recorder
from trtllm_standin.queues import AsyncQueue, wake_readers
from trtllm_standin.release import Release
from trtllm_standin.responses import Response
from trtllm_standin.scheduler import Batch, Limits, Scheduler
from trtllm_standin.sequences import Request, Sequence, StepFault
from trtllm_standin.settings import Fault, Settings
from trtllm_standin.statistics import Statistics

PUBLISH_S = 0.2
"""How often statistics leave the worker (near 1.2.1: worker.py, dispatch_stats)."""


@dataclass(frozen=True, slots=True)
class Cancel:
    """A message: the caller wants nothing more of this request."""

    request_id: int


@dataclass(frozen=True, slots=True)
class Listeners:
    """Whom the engine's thread tells."""

    ended: Callable[[int], None]
    """A request has got its last item."""
    died: Callable[[Exception], None]
    """Nothing more will come, of any."""
    measured: Callable[[list[str]], None] | None = None
    """Statistics; None if nobody listens."""


class Engine:
    """Runs requests. `submit`, `cancel` and `stop` from any thread."""

    def __init__(
        self, limits: Limits, settings: Settings, release: Release, recorder: Recorder, statistics: Statistics | None
    ) -> None:
        self.scheduler = Scheduler(limits)
        self.statistics = statistics
        self._listeners: Listeners
        self._settings = settings
        self._release = release
        self._recorder = recorder
        self._inbox: SimpleQueue[Request | Cancel | None] = SimpleQueue()
        self._requests: dict[int, Request] = {}
        self._cancelled: set[int] = set()
        self._wake: list[AsyncQueue] = []
        self._is_stopping = False
        self._is_blocked = False
        self._is_frozen = False
        self._published = 0.0
        self._thread = threading.Thread(target=self._run, name="trtllm-standin", daemon=True)

    def start(self, listeners: Listeners) -> None:
        """Begin the loop."""
        self._listeners = listeners
        self._thread.start()

    def submit(self, request: Request) -> None:
        """Take a request."""
        self._inbox.put(request)

    def cancel(self, request_id: int) -> None:
        """End a request, if it is there."""
        self._inbox.put(Cancel(request_id))

    def stop(self) -> None:
        """End the loop as soon as nothing is left to do: it waits for what runs (py_executor.py)."""
        self._inbox.put(None)

    def join(self) -> None:
        """Wait for the end of the loop, without a limit."""
        self._thread.join()

    def freeze(self) -> None:
        """Never produce anything again, as when a worker process is gone and nobody notices."""
        self._is_frozen = True

    @property
    def active(self) -> int:
        """Sequences that are in the batch, or next to it."""
        return len(self.scheduler.active)

    @property
    def waiting(self) -> int:
        """Requests that are not in yet."""
        return len(self.scheduler.waiting) + self._inbox.qsize()

    def _run(self) -> None:
        while self._iterate():
            wake_readers(self._wake)
            self._wake.clear()
        wake_readers(self._wake)

    def _iterate(self) -> bool:
        """One iteration; False when it was the last."""
        scheduler = self.scheduler
        self._fetch(wait=self._is_blocked or (scheduler.is_idle and not self._is_stopping))
        if self._is_frozen:
            threading.Event().wait()
        if self._is_stopping and scheduler.is_idle:
            return False
        for request, problem in scheduler.activate():
            self._fail([request], problem)
        started, active = time.perf_counter(), len(scheduler.active)
        batch = scheduler.schedule()
        # With nothing to compute, nothing is cancelled either: _handle_canceled_requests sits under can_queue.
        self._is_blocked = not batch and not scheduler.is_idle
        if not batch:
            return True
        self._pause(batch, started)
        count, interval = self._settings.tokens_per_step, scheduler.limits.stream_interval
        try:
            responses = [sequence.step(count, interval) for sequence in batch.sampling]
        except StepFault as fault:
            return self._fall(fault)
        self._respond(batch.sampling, responses)
        if self._cancelled:
            self._handle_cancels()
        self._measure(batch, active, started)
        return True

    def _fetch(self, *, wait: bool) -> None:
        """Empty the inbox; when there is nothing to do, wait for it to have something."""
        if wait:
            self._receive(self._inbox.get())
        while not self._inbox.empty():
            self._receive(self._inbox.get())

    def _receive(self, message: Request | Cancel | None) -> None:
        match message:
            case None:
                self._is_stopping = True
            case Cancel(request_id):
                self._cancelled.add(request_id)
            case _:
                self._requests[message.id] = message
                self.scheduler.waiting.push(message)

    def _pause(self, batch: Batch, started: float) -> None:
        """Take the time that the step is to take; at the least let other threads run."""
        pace = (self._settings.step_ms + self._settings.prefill_us * batch.context_tokens / 1e3) / 1e3
        time.sleep(max(started + pace - time.perf_counter(), 0.0))

    def _handle_cancels(self) -> None:
        """Cancel what was asked for, after the step: what ended by itself in it has ended so.

        A request that is not active yet is dropped from the queue, and nobody hears of it (py_executor.py, and the older
        update_waiting_queue): whoever reads its results waits for ever. One that has ended, or never was, is let be.
        """
        spoils = self._settings.cancel_with_token and self._release.lacks_cancelled_logprobs
        for request_id in self._cancelled:
            request = self._requests.get(request_id)
            if request is None:
                continue
            if self.scheduler.waiting.drop(request):
                del self._requests[request_id]
                self._recorder.write("end", id=request_id, reason="dropped", tokens=0)
                continue
            open_sequences = [sequence for sequence in request.sequences if sequence.finish is None]
            self._respond(open_sequences, [sequence.cancel(with_token=spoils) for sequence in open_sequences])
        self._cancelled.clear()

    def _respond(self, sequences: list[Sequence], responses: list[Response | None]) -> None:
        """Give each sequence's reader its item, if there is one."""
        ended = []
        failed: dict[int, tuple[Request, str]] = {}
        for sequence, response in zip(sequences, responses, strict=True):
            request = sequence.request
            if response is None:
                if sequence.error is not None:
                    failed[request.id] = (request, sequence.error)
                continue
            self._deliver(request, response)
            if response.finish is not None:
                ended.append(sequence)
                if response.is_final:
                    self._forget(request, response.finish.name)
        if ended:
            self.scheduler.end(ended)
        for request, error in failed.values():
            self._fail([request], error)

    def _fail(self, requests: list[Request], message: str) -> None:
        """_handle_errors: an error in the place of an item, and everything that the requests held is free."""
        for request in requests:
            self.scheduler.end(request.sequences)
            self._deliver(request, ErrorResponse(request.id, message, request.id))
            self._forget(request, "error")

    def _deliver(self, request: Request, item: object) -> None:
        queue = request.queue
        queue.append(item)
        if isinstance(queue, AsyncQueue):
            self._wake.append(queue)

    def _forget(self, request: Request, reason: str) -> None:
        del self._requests[request.id]
        self._listeners.ended(request.id)
        if self._recorder.is_on:
            tokens = sum(len(sequence.generated) for sequence in request.sequences)
            self._recorder.write("end", id=request.id, reason=REASONS.get(reason, reason), tokens=tokens)

    def _fall(self, fault: StepFault) -> bool:
        """What comes of a step that failed; False if the loop is over."""
        if fault.fault is Fault.HANG:
            wake_readers(self._wake)
            threading.Event().wait()
        if fault.fault is Fault.FATAL:
            self._listeners.died(RuntimeError(str(fault)))
            return False
        # _handle_errors answers all active requests with the same text. Those that wait are not answered and go on – or,
        # with the overlap scheduler, wait for ever: its loop ends by "assert sample_state is not None".
        active = {sequence.request.id: sequence.request for sequence in self.scheduler.active}
        self._fail(list(active.values()), str(fault))
        return not self._settings.step_fail_ends

    def _measure(self, batch: Batch, active: int, started: float) -> None:
        if self.statistics is None:
            return
        now = time.perf_counter()
        self.statistics.add(self.scheduler, batch, active=active, unfetched=self._inbox.qsize(), seconds=now - started)
        publish = self._listeners.measured
        if publish is not None and (self.scheduler.is_idle or now - self._published >= PUBLISH_S):
            self._published = now
            publish(self.statistics.take())


REASONS = {"END_ID": "stop", "STOP_WORDS": "stop", "LENGTH": "length", "CANCELLED": "cancelled"}
"""How `inspection` spells the ends of sequences: a request's is that of its last."""
