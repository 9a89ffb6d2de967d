"""The engine's thread, and the one session that drives the engine.

A session is a loop on the engine's thread:

    boundary  apply at most one set of orders; with nothing to run, block until orders arrive
    report    send the result of the last step, with the number of the last orders applied
    step      run one forward pass

The report of a step leaves after the orders of the next boundary were applied and before the next step runs. A client
learns one step earlier that its orders were applied, and the device never waits for a report to be written.
"""

import asyncio
import queue
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from text_generation_common.log import log
from text_generation_proto.cache_groups import CacheGroup
from text_generation_proto.v1 import shard_pb2 as pb
from text_generation_proto.values import WarmUpLimits
from text_generation_shard.engine import Engine, EngineError, NewSequence, Orders, StepResult
from text_generation_shard.progress import StepMonitor
from text_generation_shard.spans import SequenceSpans

if TYPE_CHECKING:
    from text_generation_common.tracer import Tracer


P = ParamSpec("P")
R = TypeVar("R")


@dataclass(slots=True)
class EngineSession:
    """Drives `engine` until `end`. Calls `emit` on the engine's thread."""

    engine: Engine
    emit: Callable[[StepResult], None]
    monitor: StepMonitor
    spans: SequenceSpans = field(default_factory=SequenceSpans)
    at_boundary: Callable[[], None] = lambda: None
    """Called on the engine's thread at each boundary."""
    ending: bool = False
    """True after `end`: the session is over at the next boundary."""
    _inbox: queue.SimpleQueue[Orders | None] = field(default_factory=queue.SimpleQueue)
    """None wakes the loop without orders."""

    def order(self, orders: Orders) -> None:
        """Queue orders. They are applied in order, one set per boundary. May be called from any thread.

        Compiling of grammars and decoding of images start here. Orders do not wait for them.
        """
        if any(sequence.grammar is not None or sequence.media for sequence in orders.placements):
            placements = (self._with_images(self._with_matcher(sequence)) for sequence in orders.placements)
            orders = replace(orders, placements=tuple(placements))
        if orders.copies:
            orders = replace(orders, on_copied=partial(self._put, None))
        self._put(orders)

    def _with_matcher(self, sequence: NewSequence) -> NewSequence:
        grammars = self.engine.grammars
        if sequence.grammar is None or grammars is None:
            return sequence
        first = len(sequence.prompt) - sequence.generated_tokens
        generated = () if sequence.logprobs.generated else sequence.prompt[first:]
        matcher = grammars.build(sequence.grammar, generated)
        # The engine may have nothing to compute until the matcher exists.
        matcher.add_done_callback(lambda _: self._put(None))
        return replace(sequence, matcher=matcher)

    def _with_images(self, sequence: NewSequence) -> NewSequence:
        if not 0 < len(sequence.media) <= self.engine.info.max_images or self.engine.decode_images is None:
            return sequence
        images = self.engine.decode_images(sequence)
        images.add_done_callback(lambda _: self._put(None))
        return replace(sequence, images=images)

    def end(self) -> None:
        """End the session at the next boundary and discard queued orders. May be called from any thread."""
        self.ending = True
        self._put(None)

    def report(self) -> None:
        self._put(None)

    def _put(self, orders: Orders | None) -> None:
        self._inbox.put(orders)
        self.engine.wake()

    def run(self) -> None:
        """Run steps until `end`, then drop every sequence. Raises the engine's fatal errors."""
        engine, monitor, spans = self.engine, self.monitor, self.spans
        steps = applied = step_ns = forward_ns = 0
        scored: set[int] = set()
        """Slots of sequences with log-probabilities of their tokens."""
        result: StepResult | None = None
        try:
            while True:
                if result is None:
                    monitor.idle()
                try:
                    orders = self._inbox.get(block=result is None) or Orders(number=applied)
                except queue.Empty:
                    orders = None
                monitor.begin()
                if self.ending:
                    return
                self.at_boundary()
                if orders is not None:
                    failures = engine.apply(orders)
                    applied = orders.number
                    spans.ordered(orders, failures)
                    for sequence in orders.placements:
                        (scored.add if sequence.logprobs.tokens else scored.discard)(sequence.slot)
                    result = result or StepResult()
                    result.failed += failures
                if result is not None and (orders is not None or not result.is_silent):
                    if scored.isdisjoint(result.slots):
                        result.logprobs = []
                    result.step, result.step_ns, result.forward_ns = steps, step_ns, forward_ns
                    result.orders_applied, result.running = applied, engine.running
                    result.used_blocks, result.queued = engine.used_blocks, engine.queued
                    self.emit(result)
                    step_ns = forward_ns = 0
                started = time.perf_counter_ns()
                result = engine.step()
                if result is not None and result.is_step:
                    took_ns = time.perf_counter_ns() - started
                    steps, step_ns, forward_ns = steps + 1, step_ns + took_ns, forward_ns + result.forward_ns
                    if not engine.prefilling:
                        monitor.decoded(took_ns / 1e9)
                    spans.stepped(result, took_ns)
        finally:
            engine.reset()
            monitor.idle()


class SessionOwner:
    """Lends the engine to one session at a time. Used on the event loop only."""

    def __init__(self, thread: ThreadPoolExecutor, tracer: "Tracer | None" = None) -> None:
        """`thread` is the only one that touches the engine. A call on it goes on if its future is cancelled."""
        self._thread = thread
        self._tracer = tracer
        self.engine: Engine | None = None
        """None while the model loads."""
        self.is_warm = False
        """True once the engine is warmed up."""
        self._warmed: tuple[WarmUpLimits, asyncio.Future[tuple[CacheGroup, ...]]] | None = None
        """The last warm-up, unless it failed."""
        self.session: EngineSession | None = None
        """The open session. One that is ending stays here until its last step is done."""
        self.draining = False
        """True after `drain`. Reports carry it, and the client should end its session when it has no sequences left."""
        self.stopping = False
        self.monitor = StepMonitor()
        self.crashed = asyncio.Event()
        """Set when the engine, or one of its GPUs, failed for good."""
        self.fault = ""
        """The fault of a GPU, if that is the cause."""
        self._gpus: list[pb.GpuState] = []
        """The state of the GPUs, until a report takes it."""
        self._on_report: Callable[[StepResult | None], None]
        """That of the open session."""
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        """Calls for the next boundary."""
        self._closed = asyncio.Event()
        self._closed.set()

    def serve(self, engine: Engine) -> None:
        """Serve `engine` from now on."""
        loop = asyncio.get_running_loop()

        def on_broken(reason: str) -> None:
            with suppress(RuntimeError):  # the loop is closed: the process is exiting
                loop.call_soon_threadsafe(self.crashed.set)

        self.engine = engine
        engine.on_broken(on_broken)

    def warm_up(self, engine: Engine, limits: WarmUpLimits) -> asyncio.Future[tuple[CacheGroup, ...]]:
        """Start to warm the engine up; the result is the groups of its cache. Needs `wait_until_free` before it."""

        def on_done(done: asyncio.Future[tuple[CacheGroup, ...]]) -> None:
            if not done.cancelled() and done.exception() is None:
                self.is_warm = all(group.num_blocks for group in done.result())
            elif self._warmed is not None and self._warmed[1] is done:
                self._warmed = None

        self.is_warm = False  # the old pool is gone
        warming = asyncio.get_running_loop().run_in_executor(self._thread, engine.warm_up, limits)
        self._warmed = limits, warming
        warming.add_done_callback(on_done)
        return warming

    def at_boundary(self, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[R]:
        """Make a short call on the engine's thread: at the next step boundary, at once if no session is open."""
        done = Future[R]()

        def run() -> None:
            try:
                done.set_result(call(*args, **kwargs))
            except BaseException as error:  # noqa: BLE001 - the caller gets it
                done.set_exception(error)

        self._calls.put(run)
        self._thread.submit(self._make_calls)  # after the session, if that does not come to a boundary
        if self.session is not None:
            self.session.report()
        return asyncio.wrap_future(done)

    def _make_calls(self) -> None:
        while not self._calls.empty():
            self._calls.get()()

    def warmed_up(self, limits: WarmUpLimits) -> asyncio.Future[tuple[CacheGroup, ...]] | None:
        """Return the last warm-up if it had these limits and did not fail; it may still run."""
        return self._warmed[1] if self._warmed is not None and self._warmed[0] == limits else None

    async def wait_until_free(self) -> bool:
        """Return True once no session is open, False if one is in use. One whose client is gone ends with the step in progress."""
        while self.session is not None:
            if not self.session.ending:
                return False
            await self._closed.wait()
        return True

    def open_session(self, engine: Engine, on_report: Callable[[StepResult | None], None]) -> EngineSession:
        """Start a session on the engine's thread. Needs `wait_until_free` before it.

        `on_report` gets each report, and None when the session is over. The session ends with the step in progress if its
        client breaks off.
        """
        loop = asyncio.get_running_loop()

        def emit(report: StepResult) -> None:
            # The reports not yet handled are bounded: a sequence cannot run past its blocks.
            with suppress(RuntimeError):  # the loop is closed: the process is exiting
                loop.call_soon_threadsafe(on_report, report)

        def on_done(done: asyncio.Future[None]) -> None:
            # Change the state before logging: a log record that cannot be written must not leave a client waiting.
            self.session = None
            self._closed.set()
            spans.close()
            error = None if done.cancelled() else done.exception()
            if error is not None:
                self.crashed.set()
            on_report(None)
            if isinstance(error, EngineError):
                log.error("the engine failed", reason=str(error))
            elif error is not None:
                log.error("the engine failed", exc_info=error)
            log.info("session closed")

        spans = SequenceSpans(self._tracer, engine.info.engine)
        session = self.session = EngineSession(engine, emit, self.monitor, spans, self._make_calls)
        self._on_report = on_report
        self._closed.clear()
        log.info("session opened")
        loop.run_in_executor(self._thread, session.run).add_done_callback(on_done)
        return session

    def end_session(self) -> None:
        """End the open session at its next step boundary; no-op if none is open."""
        if self.session is not None:
            self.session.end()

    def drain(self) -> None:
        """Take no new sessions. The open one continues its sequences."""
        self.draining = True
        if self.session is not None:
            self.session.report()

    def fail(self, fault: str) -> None:
        """End the open session at once after a fault of a GPU: the results of the step in progress cannot be trusted."""
        self.fault = fault
        self.crashed.set()
        if self.session is not None:
            self._on_report(None)

    def show_gpus(self, states: list[pb.GpuState]) -> None:
        """Send the state of the GPUs with the next report; without running sequences that comes at once."""
        self._gpus = states
        if self.session is not None and not self.session.engine.running:
            self.session.report()

    def take_gpus(self) -> list[pb.GpuState]:
        """Return the state of the GPUs if it was not taken yet, else []."""
        taken, self._gpus = self._gpus, []
        return taken

    def stop(self) -> None:
        """End the open session: the shard is stopping."""
        self.stopping = True
        self.end_session()
