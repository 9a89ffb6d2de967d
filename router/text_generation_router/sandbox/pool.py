"""Jobs that may hang or eat memory, in child processes that can be killed.

A chat template and a grammar are programs that somebody else wrote. Run here, one could hold the event loop, or the
GIL, as long as it likes; a thread cannot be killed. So each kind of job has a sandbox: a few small processes, limited in
memory, time and output, that give way to the step loop (nice). Each does one job at a time. A worker that is too slow,
or dies, is replaced while the others go on.

    call ──▶ waiting (FIFO, bounded) ──▶ an idle worker ──▶ result
              └─ too long ──▶ Overloaded     └─ too slow, dead ──▶ SandboxError, and a new worker

There are no tasks in it: a worker's socket and timers call back on the loop.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from types import TracebackType
from typing import Any, Self

from text_generation_router.errors import Overloaded
from text_generation_router.sandbox.errors import SandboxBroken, SandboxCrashed, SandboxError
from text_generation_router.sandbox.process import Outcome, WorkerProcess

START_TIMEOUT_S = 30.0
"""A worker that has not made its job by then is killed."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
"""Before a worker that could not start is started again; doubled each time."""

PATIENCE_S = 1.0
"""How long a call waits for a worker before its caller is told that the server is overloaded."""

CLOSED = "the sandbox is closed"


@dataclass(frozen=True, slots=True)
class Setup:
    """What a worker does: `factory` is "module:function"; called with `config` (JSON), it returns bytes -> bytes."""

    factory: str
    config: Mapping[str, Any] = field(default_factory=dict)
    niceness: int = 5


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    payload: bytes
    answer: asyncio.Future[bytes]
    is_repeated: bool = False
    """Its first worker died under it."""


class Sandbox:
    """A pool of worker processes for one kind of job. Belongs to the event loop it was started on."""

    def __init__(
        self,
        setup: Setup,
        *,
        workers: int,
        timeout_s: float,
        memory_bytes: int,
        max_waiting: int,
        max_output: int,
    ) -> None:
        """`timeout_s`: a job's time, from when a worker takes it. `memory_bytes`: a worker's heap, interpreter included
        (some 15 MB). `max_waiting`: calls that wait for a worker. `max_output`: bytes of a result."""
        assert workers > 0
        self._factory = setup.factory
        self._settings = json.dumps(
            {
                "config": dict(setup.config),
                "niceness": setup.niceness,
                "memory_bytes": memory_bytes,
                "max_output": max_output,
            }
        ).encode()
        self._size, self._timeout_s, self._max_waiting, self._max_output = workers, timeout_s, max_waiting, max_output
        self._waiting: deque[_Call] = deque()
        self._idle: list[WorkerProcess] = []
        self._ready: set[WorkerProcess] = set()
        """Those that made their job: idle or busy."""
        self._processes: set[WorkerProcess] = set()
        """All that are not reaped yet."""
        self._started: asyncio.Future[None] | None = None
        self._start_error: SandboxError | None = None
        """Why the last worker that tried to start could not."""
        self._pause_s = FIRST_PAUSE_S
        self._closed = False

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def start(self) -> None:
        """Start all workers and wait until they are ready. Raises SandboxError with what the factory complained of."""
        assert self._started is None, "a sandbox starts once"
        self._started = asyncio.get_running_loop().create_future()
        try:
            for _ in range(self._size):
                self._start_worker()
            await self._started
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Kill the workers and wait until they are gone; calls under way fail."""
        self._closed = True
        self._fail_waiting(CLOSED)
        processes = tuple(self._processes)
        for process in processes:
            process.end(SandboxBroken(CLOSED))
        for process in processes:
            await process.gone

    async def call(self, payload: bytes) -> bytes:
        """Do one job. Raises SandboxError (SandboxTimeout, SandboxOutOfMemory, SandboxBroken); Overloaded if too many
        wait, or this one too long.

        A caller that is cancelled leaves the line; if its job runs already, it runs on, and its result is dropped.
        """
        if self._closed or self._started is None:
            raise SandboxBroken(CLOSED)
        if not self._ready and self._start_error is not None:
            raise SandboxBroken(str(self._start_error))
        if not self._idle and len(self._waiting) >= self._max_waiting:
            raise Overloaded
        call = _Call(payload, asyncio.get_running_loop().create_future())
        self._waiting.append(call)
        self._dispatch()
        patience = asyncio.get_running_loop().call_later(PATIENCE_S, self._give_up, call)
        try:
            return await call.answer
        except asyncio.CancelledError:
            with suppress(ValueError):
                self._waiting.remove(call)
            raise
        finally:
            patience.cancel()

    @property
    def pids(self) -> frozenset[int]:
        """Of the workers that are ready."""
        return frozenset(worker.pid for worker in self._ready)

    @property
    def waiting(self) -> int:
        """Calls that wait for a worker."""
        return len(self._waiting)

    def _give_up(self, call: _Call) -> None:
        """Whoever still waits by now is told so: a queue of slow jobs must not become a queue of silent clients."""
        if call in self._waiting:
            self._waiting.remove(call)
            call.answer.set_exception(Overloaded())

    def _dispatch(self) -> None:
        while self._idle and self._waiting:
            call = self._waiting.popleft()
            self._idle.pop().ask(call.payload, self._timeout_s, partial(self._finished, call))

    def _finished(self, call: _Call, worker: WorkerProcess, outcome: Outcome) -> None:
        if not call.answer.done():  # else its caller has left
            if isinstance(outcome, SandboxCrashed) and not call.is_repeated:
                # Whoever killed the worker need not have meant this job. If the job did it, it does it again.
                self._waiting.appendleft(replace(call, is_repeated=True))
            elif isinstance(outcome, SandboxError):
                call.answer.set_exception(outcome)
            else:
                call.answer.set_result(outcome)
        if worker.alive:
            self._idle.append(worker)
            self._dispatch()
        else:
            self._replace(worker)

    def _ended_idle(self, worker: WorkerProcess) -> None:
        if worker in self._ready:  # else it could not start, and that is seen to
            self._idle.remove(worker)
            self._replace(worker)

    def _replace(self, worker: WorkerProcess) -> None:
        self._ready.discard(worker)
        self._start_worker()

    def _start_worker(self) -> None:
        if self._closed:
            return
        try:
            worker = WorkerProcess(self._factory, self._max_output, self._ended_idle)
        except OSError as error:  # no memory, no file descriptor, no process left
            self._could_not_start(SandboxError(f"a worker cannot be started: {error.strerror}"))
            return
        self._processes.add(worker)
        worker.gone.add_done_callback(lambda _: self._processes.discard(worker))
        worker.ask(self._settings, START_TIMEOUT_S, self._made_its_job)

    def _made_its_job(self, worker: WorkerProcess, outcome: Outcome) -> None:
        if isinstance(outcome, SandboxError):
            worker.end(outcome)
            self._could_not_start(outcome)
            return
        self._start_error, self._pause_s = None, FIRST_PAUSE_S
        self._ready.add(worker)
        self._idle.append(worker)
        if self._started is not None and not self._started.done() and len(self._ready) == self._size:
            self._started.set_result(None)
        self._dispatch()

    def _could_not_start(self, error: SandboxError) -> None:
        self._start_error = error
        if self._closed:
            return
        if self._started is not None and not self._started.done():
            self._started.set_exception(error)
            return
        if not self._ready:
            self._fail_waiting(str(error))
        asyncio.get_running_loop().call_later(self._pause_s, self._start_worker)
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)

    def _fail_waiting(self, reason: str) -> None:
        while self._waiting:
            call = self._waiting.popleft()
            if not call.answer.done():
                call.answer.set_exception(SandboxBroken(reason))
