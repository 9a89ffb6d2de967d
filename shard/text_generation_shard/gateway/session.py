"""The gateway's side of the engine: the calls being answered, and the one session they share.

    waiting ──a slot is free──► running ──finished, failed, cancelled──► slot free again

The gateway keeps its session while it is idle and gives it up when a router asks for the engine. A router's session lasts as
long as its stream.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import structlog

from text_generation_proto.values import FailureCode, WarmUpLimits
from text_generation_shard.engine import Engine, EngineError, NewSequence, Orders, StepResult, TopTokens
from text_generation_shard.gateway.call import GatewayCall, SequenceOutput
from text_generation_shard.gateway.request import CallFailed
from text_generation_shard.session import EngineSession, SessionOwner

log = structlog.get_logger()

MAX_WAITING = 1024
"""Default limit of sequences that wait for a slot."""
_STATUS = {
    FailureCode.INVALID: grpc.StatusCode.INVALID_ARGUMENT,
    FailureCode.NUMERICS: grpc.StatusCode.INTERNAL,
    FailureCode.GRAMMAR: grpc.StatusCode.INVALID_ARGUMENT,
    FailureCode.STEP: grpc.StatusCode.INTERNAL,
}


class SharedSession:
    """One session on the engine, shared by the gateway's calls. Used on the event loop only.

    An output that leaves before its end keeps its slot until a report shows that the release was applied; tokens reported for
    it until then are dropped. At most one set of orders is in flight: later changes are collected for the next, so that two
    hundred simultaneous calls take two step boundaries and not two hundred.
    """

    def __init__(self, owner: SessionOwner, engine: Engine, end_reason: Callable[[], CallFailed]) -> None:
        """`end_reason` returns the error for calls that run when the session ends."""
        self.over = False
        """True if the session has ended or is ending."""
        self._end_reason = end_reason
        self._waiting: deque[SequenceOutput] = deque()
        self._running: dict[int, SequenceOutput] = {}
        """By slot."""
        self._free = list(reversed(range(engine.info.max_slots)))
        self._to_release: set[int] = set()
        """Slots to release with the next orders."""
        self._releasing: set[int] = set()
        """Slots that the orders in flight release."""
        self._ordered = 0
        self._applied = 0
        self.session: EngineSession = owner.open_session(engine, self._on_report, self._on_wanted)

    def add(self, outputs: Iterable[SequenceOutput]) -> None:
        """Queue sequences. They start in this order as slots come free."""
        self._waiting += outputs
        self._send_orders()

    def drop(self, outputs: Iterable[SequenceOutput]) -> None:
        """Remove sequences; no-op for those that have ended."""
        if self.over:
            return
        for output in outputs:
            if output in self._waiting:
                self._waiting.remove(output)
            else:
                self._release(output)
        self._send_orders()

    def _on_wanted(self) -> None:
        """End the session if it is idle: a router asks for the engine."""
        if not self.over and not self._waiting and not self._running:
            self._close()

    def _on_report(self, report: StepResult | None) -> None:
        """Handle a report; None means that the session is over."""
        if self.over:
            return
        if report is None:
            self._fail_all(self._end_reason())
            return
        try:
            self._deliver(report)
            if report.orders_applied > self._applied:
                self._applied = report.orders_applied
                self._free += self._releasing
                self._releasing.clear()
            self._send_orders()
        except Exception:  # a bug here must not leave a client waiting
            log.exception("bug")
            self._close()
            self._fail_all(CallFailed(grpc.StatusCode.INTERNAL, "the shard failed"))

    def _close(self) -> None:
        """End the session, which drops every sequence of the engine."""
        self.over = True
        self.session.end()

    def _fail_all(self, why: CallFailed) -> None:
        """End every sequence with `why`."""
        self.over = True
        for output in (*self._waiting, *self._running.values()):
            output.fail(why)
        self._waiting.clear()
        self._running.clear()

    def _send_orders(self) -> None:
        """Send the collected changes, unless orders are in flight."""
        if self.over or self._ordered > self._applied:
            return
        admit: list[NewSequence] = []
        while self._waiting and self._free:
            output = self._waiting.popleft()
            output.sequence = replace(output.sequence, slot=self._free.pop())
            self._running[output.sequence.slot] = output
            admit.append(output.sequence)
        if admit or self._to_release:
            self._ordered += 1
            self._releasing, self._to_release = self._to_release, set()
            self.session.order(Orders(self._ordered, release=tuple(self._releasing), admit=tuple(admit)))

    def _deliver(self, report: StepResult) -> None:
        finished = dict(report.finished)
        for slot, cached in report.cached:
            if (output := self._running.get(slot)) is not None:
                output.cached_tokens = cached
        for slot, token_ids, logprobs, tops in _by_slot(report):
            if (output := self._running.get(slot)) is not None:
                output.add(token_ids, logprobs, tops, finished.get(slot))
                if output.is_over and slot not in finished:
                    self._release(output)  # a stop string
        for scores in report.prompt_logprobs:
            if (output := self._running.get(scores.slot)) is not None:
                output.prompt_scores = scores
        for failure in report.failed:
            if (output := self._running.get(failure.slot)) is not None:
                output.fail(CallFailed(_STATUS[failure.code], failure.message))
        for slot in (*finished, *(failure.slot for failure in report.failed)):
            if (output := self._running.get(slot)) is not None:
                # Reached only if the engine broke its contract: a sequence finishes with a token, delivered above.
                output.fail(CallFailed(grpc.StatusCode.INTERNAL, "the engine ended the sequence without a token"))
            self._free_slot(slot)

    def _release(self, output: SequenceOutput) -> None:
        slot = output.sequence.slot
        if self._running.get(slot) is output:
            del self._running[slot]
            self._to_release.add(slot)

    def _free_slot(self, slot: int) -> None:
        """Free a slot whose sequence the engine has dropped."""
        if slot in self._running or slot in self._to_release or slot in self._releasing:
            self._running.pop(slot, None)
            self._to_release.discard(slot)
            self._releasing.discard(slot)
            self._free.append(slot)


class CallRegistry:
    """The calls being answered. Warms the engine up and opens the session when the first arrives; finds calls by id."""

    def __init__(self, owner: SessionOwner, max_waiting: int = MAX_WAITING) -> None:
        self._owner = owner
        self._max_waiting = max_waiting
        self._calls: dict[GatewayCall, SharedSession | None] = {}
        """Open calls and the session each runs in; None before it has one."""
        self._shared: SharedSession | None = None
        self._opening = asyncio.Lock()
        self._warming: asyncio.Future[int] | None = None

    @property
    def problem(self) -> CallFailed | None:
        """The reason why nothing can be generated now; None if there is none."""
        owner = self._owner
        if owner.stopping or owner.draining:
            return CallFailed(grpc.StatusCode.UNAVAILABLE, "the shard is stopping")
        if owner.crashed.is_set():
            return CallFailed(grpc.StatusCode.INTERNAL, "the engine failed")
        if owner.engine is None:
            return CallFailed(grpc.StatusCode.UNAVAILABLE, "the model is loading")
        if not owner.num_blocks and self._warming is not None and (why := _warm_up_problem(self._warming)):
            return CallFailed(grpc.StatusCode.INTERNAL, why)
        session = owner.session
        if session is not None and not session.ending and (self._shared is None or session is not self._shared.session):
            return CallFailed(
                grpc.StatusCode.FAILED_PRECONDITION, "a router drives this shard: its Run session is open"
            )
        return None

    @asynccontextmanager
    async def running(self, call: GatewayCall, engine: Engine) -> AsyncIterator[None]:
        """Compute `call` while the block lasts. Raises CallFailed."""
        self._check_room(call, engine.info.max_slots)
        self._calls[call] = None
        try:
            async with self._opening:
                await self._warm_up(engine)
                shared = self._calls[call] = await self._open_session(engine)
                # Outputs that were cancelled during the warm-up have nothing left to compute.
                shared.add(output for output in call.outputs if not output.is_over)
            yield
        finally:
            self._drop(call)
            del self._calls[call]

    def abort(self, request_id: str) -> bool:
        """End every call with this id. Return True if one was running."""
        calls = [call for call in self._calls if call.request.request_id == request_id and not call.is_over]
        for call in calls:
            call.cancel()
            self._drop(call)
        return bool(calls)

    def _check_room(self, call: GatewayCall, max_slots: int) -> None:
        """Raise CallFailed if the queue is full. Outputs that a client has not read yet count: they hold memory."""
        present = sum(len(other.outputs) for other in self._calls)
        if present + len(call.outputs) > max_slots + self._max_waiting:
            raise CallFailed(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{max_slots} sequences run and {self._max_waiting} wait: the shard takes no more",
            )

    async def _warm_up(self, engine: Engine) -> None:
        """Warm the engine up unless it is. A failed warm-up is tried again by the next call. Raises CallFailed."""
        if self._warming is not None and self._warming.done():
            self._warming = None
        self._check()
        if self._owner.num_blocks:
            return
        if self._warming is None:
            log.info("warming up for the gateway")
            self._warming = self._owner.warm_up(engine, WarmUpLimits())
        # The warm-up goes on for other calls if this one is cancelled.
        await asyncio.wait((self._warming,))
        if (why := _warm_up_problem(self._warming)) is None:
            log.info("warmed up", kv_blocks=self._owner.num_blocks)
        else:
            log.error(
                "cannot warm up", reason=why, exc_info=None if self._warming.cancelled() else self._warming.exception()
            )
        self._check()

    async def _open_session(self, engine: Engine) -> SharedSession:
        """Return the open session, or open one. Raises CallFailed."""
        if self._shared is None or self._shared.over:
            await self._owner.wait_until_free()
            self._check()
            self._shared = SharedSession(self._owner, engine, self._end_reason)
        return self._shared

    def _check(self) -> None:
        if (problem := self.problem) is not None:
            raise problem

    def _end_reason(self) -> CallFailed:
        return self.problem or CallFailed(grpc.StatusCode.UNAVAILABLE, "the session was ended")

    def _drop(self, call: GatewayCall) -> None:
        if (shared := self._calls[call]) is not None:
            shared.drop(call.outputs)


def _warm_up_problem(warming: asyncio.Future[int]) -> str | None:
    """Return the reason why a warm-up left no KV blocks; None if it left some or is in progress."""
    if not warming.done():
        return None
    if warming.cancelled():
        return "the engine failed to warm up"
    if (error := warming.exception()) is not None:
        return str(error) if isinstance(error, EngineError) else "the engine failed to warm up"
    return "the KV pool is smaller than a block" if warming.result() < 1 else None


def _by_slot(report: StepResult) -> Iterator[tuple[int, Sequence[int], Sequence[float], Sequence[TopTokens]]]:
    """Yield (slot, token ids, logprobs, most probable tokens) for each slot that got tokens."""
    tops: dict[int, list[TopTokens]] = {}
    for top in report.top_tokens:
        tops.setdefault(top.slot, []).append(top)
    at = 0
    for slot, count in zip(report.slots, report.token_counts or [1] * len(report.slots), strict=True):
        yield slot, report.token_ids[at : at + count], report.logprobs[at : at + count], tops.get(slot, ())
        at += count
