"""One Run session on the engine's thread: orders in, steps, reports out.

    boundary: take at most one set of orders, apply it; with nothing to run, wait for orders and burn no CPU
    report:   what the last step brought, and the number of the orders applied at the boundary after it
    step:     one forward pass

The report of a step leaves after the next boundary's orders were applied and before the next step runs. So a client
learns one step sooner that its orders were taken, and the device never waits for a report to be written.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from text_generation_shard.engine import Admission, Engine, Orders, StepResult


@dataclass(slots=True)
class Report:
    """What a client is to be told after a boundary."""

    step: int
    orders_applied: int
    result: StepResult
    step_ns: int
    """Of the steps since the report before: one, none, or several whose results said nothing."""
    running: int
    used_blocks: int
    queued: int


@dataclass(slots=True)
class Session:
    """Drives `engine` until `end`. `emit` is called on the engine's thread."""

    engine: Engine
    emit: Callable[[Report], None]
    ending: bool = False
    """Whether `end` was called: at the next boundary the session is over."""
    _inbox: queue.SimpleQueue[Orders | None] = field(default_factory=queue.SimpleQueue)
    """None: look again, something changed that is no order."""

    def order(self, orders: Orders) -> None:
        """Queue orders; they are applied in order, one set a boundary. From any thread.

        Grammars are begun here and waited for by nobody: a later order never stands behind one.
        """
        if any(admission.grammar is not None for admission in orders.admit):
            orders = replace(orders, admit=tuple(self._with_matcher(admission) for admission in orders.admit))
        self._put(orders)

    def _with_matcher(self, admission: Admission) -> Admission:
        grammars = self.engine.grammars
        if admission.grammar is None or grammars is None:
            return admission
        first = len(admission.prompt) - admission.generated_tokens
        building = grammars.build(admission.grammar, admission.prompt[first:])
        # The engine may have nothing to step until it is there.
        building.add_done_callback(lambda _: self._put(None))
        return replace(admission, matcher=building)

    def end(self) -> None:
        """End the session at the next boundary, whatever orders are left. From any thread."""
        self.ending = True
        self._put(None)  # for a session that waits for orders

    def _put(self, orders: Orders | None) -> None:
        self._inbox.put(orders)
        self.engine.wake()

    def run(self) -> None:
        """Serve until `end`; then hold nothing. Raises what the engine raises beyond its contract."""
        engine = self.engine
        steps = applied = step_ns = forward_ns = 0
        result: StepResult | None = None
        try:
            while True:
                try:
                    orders = self._inbox.get(block=result is None) or Orders(number=applied)
                except queue.Empty:
                    orders = None
                if self.ending:
                    return
                if orders is not None:
                    failures = engine.apply(orders)
                    applied = orders.number
                    result = result or StepResult()
                    result.failed += failures
                if result is not None and (orders is not None or not result.is_silent):
                    result.forward_ns = forward_ns
                    report = Report(steps, applied, result, step_ns, engine.running, engine.used_blocks, engine.queued)
                    self.emit(report)
                    step_ns = forward_ns = 0
                started = time.perf_counter_ns()
                result = engine.step()
                if result is not None:
                    steps += 1
                    step_ns += time.perf_counter_ns() - started
                    forward_ns += result.forward_ns
        finally:
            engine.reset()
