"""RequestLoop: the event loop that runs the requests, and the updates they produce.

TensorRT-LLM requires that all requests are made on one running event loop, and the shard's own loop has other work. So a thread
here runs a loop. The engine's thread starts streams and collects their updates:

    start(stream, …)  ─► loop: generate_async, then a task that reads the request to its end
    drop(stream)      ─► loop: abort(), not before the first output; later output is discarded
    collect(timeout)  ◄─ loop: all updates of one turn of the loop, handed over at once

A request that is aborted before its first output harms the library: in the engine's queue its entries stay in memory forever, and
with log-probabilities of the prompt ≥ 1.3 delivers nothing more to any request.

All tokens of one engine iteration wake the loop together, so one turn of the loop is one iteration and makes one report.
"""

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any

from text_generation_common.log import log
from text_generation_proto.values import FailureCode
from text_generation_shard.engines.tensorrt_llm.library import LLM, explain
from text_generation_shard.engines.tensorrt_llm.stream import Stream, StreamUpdate

JOIN_TIMEOUT_S = 5.0
"""Time for the thread of the loop to end."""
PROBE_POLL_S = 0.2
"""Interval at which a waiting probe checks for a broken engine."""
READ_ERRORS = (AssertionError, ValueError, IndexError, TypeError)
"""Errors of the library's reader about an output of one request: 1.2.1 asserts that every token has log-probabilities."""


class RequestLoop:
    """Runs requests on an event loop of its own. Errors other than `request_error` and READ_ERRORS mean a broken engine."""

    def __init__(self, llm: LLM, request_error: type[Exception], on_broken: Callable[[str], None]) -> None:
        self._llm = llm
        self._request_error = request_error
        self._on_broken = on_broken
        self.loop = asyncio.new_event_loop()
        self._tasks: dict[Stream, asyncio.Task[None]] = {}
        self._ready: queue.SimpleQueue[list[tuple[Stream, StreamUpdate]]] = queue.SimpleQueue()
        """The updates of each turn of the loop; an empty list wakes `collect`."""
        self._updates: list[tuple[Stream, StreamUpdate]] = []
        """The updates of this turn of the loop; used on its thread only."""
        self.last_output_at = time.monotonic()
        """Time of the last output of any request."""
        self._has_left = False
        self.has_read_error = False
        """An output could not be read: the engine may be broken. Reset when that is checked."""
        self._thread = threading.Thread(target=self._run, name="tensorrt-llm requests", daemon=True)
        self._thread.start()

    # ---------------------------------------------------------------------------------------- from the engine's thread

    def start(self, stream: Stream, arguments: Mapping[str, Any]) -> None:
        self.loop.call_soon_threadsafe(self._start, stream, arguments)

    def drop(self, stream: Stream) -> None:
        stream.dropped = True
        self.loop.call_soon_threadsafe(self._abort, stream)

    def probe(self, arguments: Mapping[str, Any], timeout_s: float, broken: Callable[[], str | None]) -> str | None:
        """Run one request to its end. Return why no token came in time, or what `broken` returns meanwhile; None if one came."""
        future = self.begin_probe(arguments)
        deadline = time.monotonic() + timeout_s
        while not wait((future,), PROBE_POLL_S).done:
            reason = broken()
            if reason is None and time.monotonic() > deadline:
                reason = f"a single token did not come within {timeout_s:.0f} s"
            if reason is not None:
                future.cancel()
                return reason
        return probe_problem(future)

    def begin_probe(self, arguments: Mapping[str, Any]) -> Future[int]:
        """Begin a request whose tokens are counted."""
        return asyncio.run_coroutine_threadsafe(self._count_tokens(arguments), self.loop)

    def collect(self, timeout_s: float) -> dict[Stream, StreamUpdate]:
        """Return the updates of each stream. Waits for an update, a call of `wake`, or the timeout."""
        pairs: list[tuple[Stream, StreamUpdate]] = []
        with suppress(queue.Empty):
            pairs += self._ready.get(timeout=timeout_s)
            while True:
                pairs += self._ready.get_nowait()
        if len(ready := dict(pairs)) < len(pairs):  # the caller is late
            ready = {}
            for stream, update in pairs:
                if (earlier := ready.setdefault(stream, update)) is not update:
                    earlier.extend(update)
        return ready

    def wake(self) -> None:
        """Make `collect` return. May be called from any thread."""
        self._ready.put([])

    def leave(self) -> None:
        """Leave the library's sockets, which are for one thread at a time, to its shutdown; that aborts what still runs."""
        self._has_left = True
        wait((asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self.loop),), JOIN_TIMEOUT_S)

    def close(self) -> None:
        """Stop reading. Requests that still run end with the engine."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(JOIN_TIMEOUT_S)

    # ----------------------------------------------------------------------------------------------------- on the loop

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            tasks = asyncio.all_tasks(self.loop)
            for task in tasks:
                task.cancel()
            if tasks:
                self.loop.run_until_complete(asyncio.wait(tasks))
            self.loop.close()

    def _start(self, stream: Stream, arguments: Mapping[str, Any]) -> None:
        task = self._tasks[stream] = self.loop.create_task(self._read(stream, arguments))
        task.add_done_callback(lambda _: self._tasks.pop(stream))

    async def _read(self, stream: Stream, arguments: Mapping[str, Any]) -> None:
        if stream.dropped or self._has_left:
            return
        try:
            result = stream.result = self._llm.generate_async(**arguments)
            # Leaving the iteration does not stop the request; iterating on after an error would wait forever.
            async for output in result:
                self._deliver(stream, stream.read(output))
                if stream.dropped:
                    self._abort(stream)
                elif stream.ended:
                    break
        except Exception as error:  # noqa: BLE001 - every error ends the stream with a failure
            self._fail(stream, error)
        else:
            if not stream.ended:
                self._deliver(stream, stream.fail(FailureCode.STEP, "the engine ended the sequence without a reason"))
            elif not stream.ended_by_engine:
                self._abort(stream)

    def _fail(self, stream: Stream, error: Exception) -> None:
        submitted = stream.result is not None
        refused = not submitted and isinstance(error, (ValueError, TypeError, self._request_error))
        if submitted and isinstance(error, READ_ERRORS):
            self.has_read_error |= not stream.dropped  # aborting may itself raise
            stream.waiting = False  # an output has arrived
            self._abort(stream)
        elif not (refused or stream.dropped or isinstance(error, self._request_error)):
            log.error("the engine failed", exc_info=error)
            self._on_broken(f"{type(error).__name__}: {explain(error)}")
        self._deliver(stream, stream.fail(FailureCode.INVALID if refused else FailureCode.STEP, explain(error)))

    async def _count_tokens(self, arguments: Mapping[str, Any]) -> int:
        tokens = 0
        async for output in self._llm.generate_async(**arguments):
            tokens = len(output.outputs[0].token_ids)
        return tokens

    def _abort(self, stream: Stream) -> None:
        running = stream.result is not None and not (stream.waiting or stream.ended_by_engine or stream.aborted)
        if not running or self._has_left or not stream.may_abort:
            return  # never submitted, aborted later, over, aborted already, or left to run
        stream.aborted = True
        try:
            stream.result.abort()
        except Exception as error:  # noqa: BLE001 - the engine is shutting down, which is reported elsewhere
            log.warning("a request could not be aborted", reason=explain(error))

    def _deliver(self, stream: Stream, update: StreamUpdate | None) -> None:
        self.last_output_at = time.monotonic()
        if update is None or stream.dropped:
            return
        if not self._updates:
            self.loop.call_soon(self._hand_over)
        self._updates.append((stream, update))

    def _hand_over(self) -> None:
        self._ready.put(self._updates)
        self._updates = []


def probe_problem(probe: Future[int]) -> str | None:
    """Return why a probe that is over has brought no token; None if it has."""
    if (error := probe.exception()) is not None:
        return f"{type(error).__name__}: {explain(error)}"
    return None if probe.result() else "a request ended without a token"
