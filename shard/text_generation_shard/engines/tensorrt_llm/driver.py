"""Driver: the event loop on which requests live, and the inbox of what they bring.

TensorRT-LLM wants every request to be made on one and the same running loop, and none in any other thread; the shard's
own loop has other things to do. So there is a thread with a loop here. The engine's thread puts streams in and takes news out:

    begin(stream, …)  ─► loop: generate_async, then a task that reads it to its end
    drop(stream)      ─► loop: abort(); whatever still comes is nobody's
    collect(timeout)  ◄─ loop: everything that came in one turn of the loop, handed over at once

All tokens of one engine iteration wake the loop together, so one turn of it is one iteration, and makes one report.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import wait
from contextvars import copy_context
from typing import Any

import structlog

from text_generation_proto.values import FailureCode
from text_generation_shard.engines.tensorrt_llm.api import LLM
from text_generation_shard.engines.tensorrt_llm.stream import News, Stream

ABORT_TIMEOUT_S = 5.0
"""A dropped request is read to its end for so long: a cancel takes effect with the iteration in progress."""

LOOK_EVERY_S = 0.2
"""Whoever waits for a proof looks up so often."""

log = structlog.get_logger()


class Driver:
    """See the module. `request_errors` are those that concern one request; any other means that the engine is broken."""

    def __init__(self, llm: LLM, request_errors: tuple[type[Exception], ...], on_broken: Callable[[str], None]) -> None:
        self._llm = llm
        self._request_errors = request_errors
        self._on_broken = on_broken
        self.loop = asyncio.new_event_loop()
        self._tasks: dict[Stream, asyncio.Task[None]] = {}
        self._lock = threading.Condition()
        self._ready: dict[Stream, News] = {}
        self._awake = False
        self._news: list[tuple[Stream, News]] = []
        """Of this turn of the loop; touched on its thread alone."""
        self.heard_at = time.monotonic()
        """When something last came of any request."""
        # What the log says of every record lives in the context.
        context = copy_context()
        self._thread = threading.Thread(
            target=context.run, args=(self._run,), name="tensorrt-llm requests", daemon=True
        )
        self._thread.start()

    # ---------------------------------------------------------------------------------------- from the engine's thread

    def begin(self, stream: Stream, arguments: Mapping[str, Any]) -> None:
        """Have the engine generate for `stream`; `arguments` are those of `generate_async`."""
        self.loop.call_soon_threadsafe(self._begin, stream, arguments)

    def drop(self, stream: Stream) -> None:
        """Nobody waits for `stream` any more."""
        stream.dropped = True
        self.loop.call_soon_threadsafe(self._abort, stream)

    def prove(self, arguments: Mapping[str, Any], timeout_s: float, broken: Callable[[], str | None]) -> str | None:
        """Have one request run to its end; what is wrong if it does not bring a token in time, None if it does.

        `broken` says why it is no use to wait any longer, once that is known.
        """
        proof = asyncio.run_coroutine_threadsafe(self._prove(arguments), self.loop)
        until = time.monotonic() + timeout_s
        while not wait((proof,), LOOK_EVERY_S).done:
            reason = broken()
            if reason is None and time.monotonic() > until:
                reason = f"a single token did not come within {timeout_s:.0f} s"
            if reason is not None:
                proof.cancel()
                return reason
        if (error := proof.exception()) is not None:
            return f"{type(error).__name__}: {first_line(error)}"
        return None if proof.result() else "a request ended without a token"

    def collect(self, timeout_s: float) -> dict[Stream, News]:
        """What came of each stream, in order; waits until something comes, `wake` is called, or the time is over."""
        with self._lock:
            if not self._ready and not self._awake:
                self._lock.wait(timeout_s)
            self._awake = False
            ready, self._ready = self._ready, {}
        return ready

    def wake(self) -> None:
        """Have `collect` return. From any thread."""
        with self._lock:
            self._awake = True
            self._lock.notify()

    def close(self) -> None:
        """Stop reading. What still runs in the engine goes down with it."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(ABORT_TIMEOUT_S)

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

    def _begin(self, stream: Stream, arguments: Mapping[str, Any]) -> None:
        task = self._tasks[stream] = self.loop.create_task(self._follow(stream, arguments))
        task.add_done_callback(lambda _: self._tasks.pop(stream))

    async def _follow(self, stream: Stream, arguments: Mapping[str, Any]) -> None:
        if stream.dropped:
            return
        submitted = False
        try:
            result = stream.result = self._llm.generate_async(**arguments)
            submitted = True
            # Leaving this loop does not stop the request, and to go on after an error would be to wait for ever.
            async for output in result:
                if (news := stream.read(output)) is not None:
                    self._tell(stream, news)
                if stream.ended:
                    break
        except self._request_errors as error:
            self._tell(stream, stream.fail(FailureCode.STEP if submitted else FailureCode.INVALID, first_line(error)))
        except Exception as error:  # noqa: BLE001 - whatever it is, it is told of
            self._failed(stream, error, submitted=submitted)
        else:
            if not stream.ended:
                self._tell(stream, stream.fail(FailureCode.STEP, "the engine ended the sequence without a word"))
            elif not stream.ended_by_engine:
                result.abort()

    def _failed(self, stream: Stream, error: Exception, *, submitted: bool) -> None:
        refused = not submitted and isinstance(error, (ValueError, TypeError))
        # An aborted request may stumble over its own bookkeeping (1.2.1 asserts that it has all log-probabilities).
        if not refused and not stream.dropped:
            log.error("the engine failed", exc_info=error)
            self._on_broken(f"{type(error).__name__}: {first_line(error)}")
        self._tell(stream, stream.fail(FailureCode.INVALID if refused else FailureCode.STEP, first_line(error)))

    async def _prove(self, arguments: Mapping[str, Any]) -> int:
        tokens = 0
        async for output in self._llm.generate_async(**arguments):
            tokens = len(output.outputs[0].token_ids)
        return tokens

    def _abort(self, stream: Stream) -> None:
        task = self._tasks.get(stream)
        if task is None or stream.ended or stream.result is None:
            return  # it is over, or was never begun
        try:
            stream.result.abort()
        except Exception as error:  # noqa: BLE001 - the engine is going down: its end is told of elsewhere
            log.warning("a request could not be aborted", reason=first_line(error))
        # One that was still in the engine's queue ends in silence.
        self.loop.call_later(ABORT_TIMEOUT_S, task.cancel)

    def _tell(self, stream: Stream, news: News | None) -> None:
        self.heard_at = time.monotonic()
        if news is None or stream.dropped:
            return
        if not self._news:
            self.loop.call_soon(self._hand_over)
        self._news.append((stream, news))

    def _hand_over(self) -> None:
        with self._lock:
            for stream, news in self._news:
                if (earlier := self._ready.setdefault(stream, news)) is not news:
                    earlier.add(news)
            self._lock.notify()
        self._news.clear()


def first_line(error: BaseException) -> str:
    """What an error says, without what libraries hang below it."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
