"""A pool of killable child processes for jobs on untrusted input.

A chat template and a grammar are untrusted programs. In the router's process they could hold the event loop, or the GIL,
for any time, and a thread cannot be killed. So each kind of job has a sandbox: a few small processes with limited
memory, CPU time and output and a low priority (nice). A worker that is too slow or dies is replaced while the others go
on. A job is judged by its CPU time, because on a busy machine every job takes long.

The pool is our own because pebble's (5.2.3 was tried) gives its children the whole environment, keys included, unpickles
what they send, lets one that ignores SIGTERM run three seconds past its limit, and does not bound its queue.
"""

import asyncio
import json
import signal
import subprocess
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import cache
from typing import Any, Self

from text_generation_common.log import log
from text_generation_common.sandbox.process import start_process
from text_generation_common.sandbox.worker import HEADER, MAX_MESSAGE, FrameKind
from text_generation_router.admission_queue import Claim, PendingWork, WorkerQueue
from text_generation_router.errors import CannotKeepUp
from text_generation_router.request import DEFAULT_TENANT, TenantId

START_TIMEOUT_S = 30.0
"""Time in which a worker must have created its job."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
"""Pause before a worker that could not start is started again; doubled each time."""
WALL_TIMES, MIN_WALL_S = 5, 30.0
"""Limit of a job's wall-clock time: a multiple of its CPU time, and its minimum in seconds."""
EXIT_S = 1.0
"""Time in which a worker that closed its socket must have ended."""
NICENESS = 5
CLOSED = "the sandbox is closed"


class SandboxError(Exception):
    """The job raised an error, or its worker died. `str()` is one line."""


class SandboxTimeout(SandboxError):
    """The job used up its CPU time; its worker was killed."""


class _Stalled(SandboxError):
    """The job got too little CPU time to end: the machine is busy. Its worker was killed."""


class SandboxOutOfMemory(SandboxError):
    """The job needed more memory than it may use; its worker was replaced."""


class SandboxBroken(SandboxError):
    """No worker can do the job: none can be started, or the sandbox is closed."""


class SandboxStackOverflow(SandboxError):
    """The job needed more stack than a worker has; its worker died."""


class _Crashed(SandboxError):
    """The worker was killed, because of the job or for another reason."""


class Sandbox:
    """A pool of worker processes for one kind of job. Belongs to the event loop it was started on."""

    def __init__(
        self,
        factory: str,
        config: Mapping[str, Any],
        *,
        workers: int,
        timeout_s: float,
        memory_bytes: int,
        max_output: int,
        stage: PendingWork | None = None,
    ) -> None:
        """`factory` is "module:function"; called with `config` (JSON) it returns a function that makes the job, a function
        bytes -> bytes. Only the factory may read files: then the worker is confined (confine.py).

        `timeout_s`: CPU time of a job. `memory_bytes`: heap of a worker, interpreter included (about 15 MB).
        `max_output`: bytes of a result. `stage`: the bound of the calls that wait.
        """
        settings = {
            "config": config,
            "niceness": NICENESS,
            "memory_bytes": memory_bytes,
            "cpu_s": timeout_s,
            "max_output": max_output,
        }
        self._settings = json.dumps(settings).encode()
        self._factory, self._size, self._timeout_s = factory, workers, timeout_s
        self._max_output = max_output
        self._turns = WorkerQueue(stage or PendingWork(), workers)
        self._over: deque[Claim] = deque()
        """The turns of calls that ended. Each is given back when a worker can do the next job."""
        self._waiting: dict[asyncio.Future[bytes], bytes] = {}
        """The payloads of calls that have their turn and wait for a worker that died to be replaced."""
        self._idle: list[_Worker] = []
        """The last one gets the next job: a tenant whose jobs cost workers gets those that replace them."""
        self._ready: set[_Worker] = set()
        """The workers that have created their job: idle or busy."""
        self._broken: str | None = CLOSED
        """The reason that no worker can do a job; None if one can."""
        self._started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """The end of the first start."""
        self._started.add_done_callback(lambda started: started.cancelled() or started.exception())
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        """Start the workers and accept calls, which wait for one."""
        self._broken = None
        tasks = await self._stack.enter_async_context(asyncio.TaskGroup())
        for _ in range(self._size):
            self._stack.callback(tasks.create_task(self._keep_worker()).cancel)
        return self

    async def ready(self) -> None:
        """Wait until all workers have created their job. Raises SandboxError with the error of the factory."""
        await asyncio.shield(self._started)

    async def close(self) -> None:
        """Kill the workers and wait until they are gone; unfinished calls fail."""
        self._break(CLOSED)
        await self._stack.aclose()

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def call(self, payload: bytes, tenant: TenantId = DEFAULT_TENANT) -> bytes:
        """Do one job when it is this tenant's turn. Raises SandboxError; Overloaded, CannotKeepUp.

        A caller that is cancelled leaves the queue; a job that already runs goes on, and its result is dropped.
        """
        if self._broken is not None:
            raise SandboxBroken(self._broken)
        turn = await self._turns.take(tenant, len(payload))
        try:
            try:
                return await self._call(payload)
            except _Crashed:
                # The worker may have been killed for another reason. If the job did it, it will do it again.
                return await self._call(payload)
        except _Stalled:
            raise CannotKeepUp from None
        finally:
            self._over.append(turn)
            self._give_back_turns()

    async def _call(self, payload: bytes) -> bytes:
        if self._broken is not None:
            raise SandboxBroken(self._broken)
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting[answer] = payload
        self._dispatch()
        try:
            return await answer
        finally:
            self._waiting.pop(answer, None)
            # An error refers to this frame: it must not refer to the error, or both stay, and the payload with them.
            del answer

    def _give_back_turns(self) -> None:
        """Give back turns that are over, except one for each worker that is restarted or busy for a caller that left.

        So a tenant whose job killed a worker waits for the new one itself.
        """
        able = sum(worker.answer is None or not worker.answer.done() for worker in self._ready)
        while self._over and (len(self._over) > self._size - able or self._broken is not None):
            self._turns.give_back(self._over.popleft())

    def _break(self, reason: str) -> None:
        """Refuse all calls, also those that wait or run."""
        self._broken = reason
        self._give_back_turns()
        for answer in (*self._waiting, *(worker.answer for worker in self._ready)):
            if answer is not None:
                _settle(answer, SandboxBroken(reason))

    def _dispatch(self) -> None:
        self._give_back_turns()
        while self._idle and self._waiting:
            answer = next(iter(self._waiting))
            payload = self._waiting.pop(answer)
            if not answer.done():
                worker = self._idle.pop()
                worker.answer = answer
                worker.ask(payload, max(WALL_TIMES * self._timeout_s, MIN_WALL_S))

    async def _keep_worker(self) -> None:
        """Run a worker; when it ends, run the next one."""
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                async with _start_worker(self._factory) as worker:
                    worker.ask(self._settings, START_TIMEOUT_S)
                    if isinstance(refused := await worker.outcome(self._max_output), SandboxError):
                        raise refused
                    if refused:
                        _warn(refused.decode(errors="replace"))
                    pause_s, self._broken = FIRST_PAUSE_S, None
                    self._ready.add(worker)
                    if len(self._ready) == self._size and not self._started.done():
                        self._started.set_result(None)
                    await self._serve(worker)
            except SandboxError as error:
                if self._started.done():
                    if not self._ready:
                        self._break(str(error))
                elif not isinstance(error, _Crashed) or pause_s > FIRST_PAUSE_S:  # one that dies has a second try
                    self._started.set_exception(error)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _serve(self, worker: "_Worker") -> None:
        """Give jobs to a ready worker until it ends."""
        try:
            while not worker.ended:
                worker.answer = None
                self._idle.append(worker)
                self._dispatch()
                outcome = await worker.outcome(self._max_output)
                if worker.answer is None:  # it died, or broke the protocol
                    self._idle.remove(worker)
                    return
                _settle(worker.answer, outcome)
                del outcome  # not kept until the next job
        finally:
            self._ready.discard(worker)


@cache
def _warn(refused: str) -> None:
    """Log once what the kernel refused."""
    log.warning("workers are not fully confined", refused=refused)


def _settle(answer: asyncio.Future[bytes], outcome: bytes | Exception) -> None:
    """Answer a call, unless it was answered or cancelled."""
    if answer.done():
        return
    if isinstance(outcome, bytes):
        answer.set_result(outcome)
    else:
        answer.set_exception(outcome)


class _Worker:
    """The router's end of a child process that does one job at a time."""

    def __init__(
        self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.process = process
        self.answer: asyncio.Future[bytes] | None = None
        """The result of its job; None while it is idle."""
        self.ended = False
        self._reader, self._writer = reader, writer
        self._timeout_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def ask(self, payload: bytes, timeout_s: float) -> None:
        """Send a job; kill the process if its outcome takes too long."""
        self._timeout_s = timeout_s
        self._timer = asyncio.get_running_loop().call_later(timeout_s, self.process.kill)
        if not self._writer.is_closing():  # else `outcome` is about to see it
            self._writer.write(HEADER.pack(len(payload), FrameKind.JOB))
            self._writer.write(payload)

    async def outcome(self, max_output: int) -> bytes | SandboxError:
        """Wait for the result of the job, or for the end of the worker, also without a job."""
        try:
            size, kind = HEADER.unpack(await self._reader.readexactly(HEADER.size))
            if size > max(max_output, 4 * MAX_MESSAGE + 4):
                raise ConnectionError  # the worker broke the protocol
            body = await self._reader.readexactly(size)
        except (asyncio.IncompleteReadError, ConnectionError):
            self.ended = True
            late = self._timer is not None and self._timer.when() <= asyncio.get_running_loop().time()
            code = await self._exit_code()
            if code == -signal.SIGPROF:
                return SandboxTimeout("took too much CPU time")
            if code == -signal.SIGSEGV:
                return SandboxStackOverflow("the worker died of SIGSEGV")
            if late:
                return _Stalled(f"did not end within {self._timeout_s:g} s")
            return _Crashed(f"the worker died of {signal.Signals(-code).name}" if code < 0 else "the worker ended")
        finally:
            if self._timer is not None:
                self._timer.cancel()
        if kind == FrameKind.OUT_OF_MEMORY:
            self.ended = True
            return SandboxOutOfMemory("needs more memory than it may have")
        return body if kind == FrameKind.RESULT else SandboxError(body.decode(errors="replace"))

    async def _exit_code(self) -> int:
        try:
            return await asyncio.to_thread(self.process.wait, EXIT_S)
        except subprocess.TimeoutExpired:  # it closed its socket and goes on
            return 0


@asynccontextmanager
async def _start_worker(factory: str) -> "AsyncIterator[_Worker]":
    """Start a worker; at the end kill it and wait until it is gone. Raises SandboxError if it cannot be started."""
    try:
        # uvloop's own way would fork while gRPC's threads run.
        process, channel = start_process(factory)
    except OSError as error:  # no executable, memory, file descriptor or process left
        raise SandboxError(f"a worker cannot be started: {error.strerror}") from error
    try:
        reader, writer = await asyncio.open_unix_connection(sock=channel)
        try:
            yield _Worker(process, reader, writer)
        finally:
            writer.transport.abort()
    finally:
        process.kill()
        try:
            await asyncio.to_thread(process.wait)
        finally:
            process.wait()  # the sandbox was closed meanwhile
