"""ReplicaConnection: the router's end of one replica's stream. Schedule, send; receive, update, deliver.

    scheduler ──schedule──► SchedulerOutput ──► shard
    listeners ◄──deliver── scheduler ◄──update── StepReport ◄──┘

A session lasts as long as the shard's stream. When the stream breaks the replica is lost to the scheduler, which moves its
requests to other replicas or to the next session of this one.
"""

import asyncio
import time
from collections.abc import Callable, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import reduce
from itertools import count
from typing import Any

import grpc

from text_generation_common.heartbeat import CHECK_EVERY_S, Silence
from text_generation_common.log import log
from text_generation_proto.client import RunCall, ShardClient
from text_generation_proto.parts import BadParts, Joiner, most_report, split
from text_generation_proto.v1 import shard_pb2 as pb
from text_generation_proto.values import PREDICTION
from text_generation_router.request import RequestId
from text_generation_router.scheduling.messages import SchedulerOutput
from text_generation_router.scheduling.scheduler import Scheduler
from text_generation_router.shards import convert
from text_generation_router.shards.adapters import ReplicaAdapters
from text_generation_router.shards.join import ReplicaInfo, ShardTaken
from text_generation_router.shards.listeners import Delivery
from text_generation_router.shards.observer import StepObserver, StepRecord

HANGS_AFTER_S = 5.0
"""A shard that has not answered for this long, or owes a report for this long and for HANGS_AFTER_STEPS of its longest recent
steps, does not count as serving and gets no new requests until it answers."""
HANGS_AFTER_STEPS = 20
ASK_EVERY = 4
"""Checks for silence to a health check while reports come: they prove that the process runs."""
HOLD_SHARE = 0.5
"""Share of a step for which orders are held; the rest is for their way to the replica."""
MIN_STEP_S = 0.004
"""Orders are not held in shorter steps."""


class ShardLost(Exception):
    """The shard's stream ended: the process died, closed it, or cannot be reached."""


class ShardStopped(ShardLost):
    """The shard ended the session in order: it was told to stop."""


@dataclass(frozen=True, slots=True)
class ClusterContext:
    """The parts of the cluster that sessions use."""

    scheduler: Scheduler
    adapters: ReplicaAdapters
    listeners: Delivery[Any]
    observer: StepObserver
    dispatch: Callable[[], None]
    """Places queued requests on replicas with room, and wakes these."""
    set_ranks: Callable[[int, int], None]
    """Makes the scheduler know so many ranks of a replica."""
    on_opened: Callable[[], None]
    """Called for each session that began."""
    hang_timeout_s: float
    """A shard that hangs for longer is lost; 0: never."""


class ReplicaConnection:
    """One replica, through all its sessions. To the scheduler each rank of its engine is a replica."""

    def __init__(self, number: int, context: ClusterContext) -> None:
        self.ranks = [number]
        """The scheduler's numbers of its ranks."""
        self.sessions = 0
        """Sessions so far."""
        self.since = 0.0
        """Time at which the last one began."""
        self.new_tokens = self.steps = 0
        self.step_seconds = 0.0
        """Counts of all sessions."""
        self._number = number
        self._context = context
        self._changed = asyncio.Event()
        """Set when there may be orders to send."""
        self._boundary = asyncio.Event()
        """Set when a report came."""
        self._ask = asyncio.Event()
        """Set to check the shard's health."""
        self._unwanted = False
        self._slots = 0
        self._most_report = 0
        """Bytes of the largest report."""
        self._info = pb.InfoResponse()
        """The shard's last description of itself."""
        self._begin_session()

    def _begin_session(self) -> None:
        """Forget the last session."""
        self.stopped = False
        """Its shard ended the session in order, as far as known: it was told to stop, and is not being restarted."""
        self.hangs = self.is_silent = False
        """It gets no new requests until it answers; it answers nothing at all."""
        self._serving, self._stopping = True, False
        self._known_health = self._health
        self._timing = OrderTiming()
        self._steps = 0
        """Steps of this session."""
        self._orders_sent = self._orders_applied = 0
        """Numbers of the last orders."""
        self._running = 0
        """Sequences on the shard."""
        self._reported = self._answered = True
        """A report, or an answer to a health check, came since the last check for silence."""
        self._longest_step_s = 0.0
        """Slowly forgotten."""

    @property
    def is_empty(self) -> bool:
        """True if it has no sequences and nothing to store."""
        replicas = (self._context.scheduler.replicas[rank] for rank in self.ranks)
        return all(each is None or each.is_empty for each in replicas)

    def wake(self) -> None:
        """Send orders if there are any."""
        self._changed.set()

    def want(self, *, wanted: bool) -> None:
        """Drain the replica while it is being reassigned or removed."""
        self._unwanted = not wanted
        self._apply_health()

    async def serve(self, client: ShardClient, info: ReplicaInfo, *, again: bool = False) -> None:
        """Run one session until cancelled; `again`: it is not the first. Raises ShardLost, ShardStopped, ShardTaken."""
        context = self._context
        self._begin_session()
        context.set_ranks(self._number, len(info.specs))
        self._slots = info.specs[-1].slots.stop
        self._most_report = most_report(info.info)
        self._info = info.info
        call = client.run()
        try:
            await client.opened(call)
            # A task of its own, because a task group that fails leaves a cancellation of its task counted in Python 3.11.
            session = self._run_session(call, client, info, again=again)
            await asyncio.create_task(session)  # noqa: TID251 - awaited at once
        except (grpc.aio.AioRpcError, BaseExceptionGroup) as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                # A task group that fails drops a cancellation of the same moment: without this a router would not stop.
                raise asyncio.CancelledError from error
            if isinstance(error, grpc.aio.AioRpcError) and error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise ShardTaken("another router drives it") from error
            losses = _losses(error)
            if not losses:
                raise
            raise next((each for each in losses if isinstance(each, ShardStopped)), losses[0]) from error
        finally:
            call.cancel()
            context.adapters.lost(tuple(self.ranks))
            context.observer.on_loss(self._number)
            for rank in self.ranks:
                deliveries = context.scheduler.lose(rank)
                context.listeners.moved(deliveries.moved)
                context.listeners.failures(deliveries.failed)
            context.dispatch()

    async def _run_session(self, call: RunCall, client: ShardClient, info: ReplicaInfo, *, again: bool) -> None:
        context = self._context
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch_health(client))
            tasks.create_task(self._watch_silence())
            info = await context.adapters.equip(tuple(self.ranks), client, info)
            for rank, spec in zip(self.ranks, info.specs, strict=True):
                opened = context.scheduler.open(rank, replace(spec, shard=self._number))
                context.listeners.failures(opened.failed)
            self.sessions, self.since = self.sessions + 1, time.monotonic()
            self._drain(draining=not self._known_health[0])
            if again:
                log.info("shard joined again", replica=self._number)
            context.on_opened()
            context.dispatch()
            tasks.create_task(self._send(call))
            tasks.create_task(self._receive(call))

    async def _watch_health(self, client: ShardClient) -> None:
        """Drain the replica while the shard answers that it does not serve: it stops, or a step does not end."""
        while True:
            await self._ask.wait()
            self._ask.clear()
            serving = True
            with suppress(grpc.aio.AioRpcError):  # a lost shard ends the session anyway; a health service is optional
                serving = await client.is_serving()
            self._answered = True
            self._serving = serving
            self._apply_health()

    async def _watch_silence(self) -> None:
        """Drain the replica while the shard is silent; raise ShardLost when it hangs.

        A shard that answers hangs only if it says so: a long prompt may take any time.
        """
        timeout_s = self._context.hang_timeout_s
        silence, overdue = Silence(), Silence()
        for check in count():
            await asyncio.sleep(CHECK_EVERY_S)
            owes = self._running > 0 or self._orders_applied < self._orders_sent
            silence.record(sign=self._reported or self._answered)
            overdue.record(sign=self._reported or not owes)
            if not self._reported or check % ASK_EVERY == 0:
                self._ask.set()
            self._reported = self._answered = False
            longest_s = max(HANGS_AFTER_S, HANGS_AFTER_STEPS * self._longest_step_s)
            self.is_silent = silence.seconds >= HANGS_AFTER_S
            self.hangs = self.is_silent or overdue.seconds >= longest_s
            self._apply_health()
            if silence.exceeds(timeout_s):
                raise ShardLost(f"it hangs: no answer for {silence.seconds} s")
            if overdue.exceeds(timeout_s) and not self._serving:
                raise ShardLost(f"it hangs: no report for {overdue.seconds} s")

    @property
    def _health(self) -> tuple[bool, bool]:
        """True if it gets new requests; True if it hangs."""
        return self._serving and not (self.hangs or self._stopping or self._unwanted), self.hangs

    def _apply_health(self) -> None:
        """Drain the replica, or let it serve again, if its health changed."""
        before, self._known_health = self._known_health, self._health
        if self._known_health != before:
            good, _ = self._known_health
            log.warning(
                "shard resumed" if good else "shard hangs" if self.hangs else "shard draining",
                replica=self._number,
                serving=self._serving,
                stopping=self._stopping,
                unwanted=self._unwanted,
            )
            self._drain(draining=not good)
            self._context.dispatch()

    def _drain(self, *, draining: bool) -> None:
        for rank in self.ranks:
            self._context.scheduler.drain(rank, draining=draining)

    async def _send(self, call: RunCall) -> None:
        context = self._context
        while True:
            await self._changed.wait()
            if (hold_s := self._timing.hold(time.monotonic())) > 0:
                self._boundary.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(hold_s):
                        await self._boundary.wait()
            self._changed.clear()
            started = time.monotonic()
            if orders := self._schedule():
                self._orders_sent = orders.number
                context.observer.on_orders(orders, time.monotonic() - started)
                for placement in orders.placements:
                    context.listeners.placed(placement.request.id, placement.own_cached_tokens, self._number)
                try:
                    files: dict[bytes, bytes] = {}
                    message = convert.orders_to_pb(
                        orders,
                        self._info.eos_token_ids,
                        own_cache=self._info.scheduling == pb.SCHEDULING_SELF,
                        shares_prompts=self._info.shares_prompts,
                        files=files,
                    )
                    for part in split(message, files):
                        await call.write(part)
                except (asyncio.InvalidStateError, grpc.aio.AioRpcError) as error:  # gRPC does not say how it ended
                    self.stopped = True
                    raise ShardLost("the shard's stream ended") from error
                # Placed prompts were scheduled: there may be room for more.
                context.dispatch()

    def _schedule(self) -> SchedulerOutput | None:
        scheduler, number = self._context.scheduler, self._orders_sent + 1
        orders = [each for rank in self.ranks if (each := scheduler.schedule(rank, number))]
        return reduce(SchedulerOutput.joined, orders) if orders else None

    async def _receive(self, call: RunCall) -> None:
        parts = Joiner[pb.StepReport](self._most_report)
        while True:
            read = await call.read()
            if not isinstance(read, pb.StepReport) or read.closing:
                self.stopped = True
                raise ShardStopped("the shard closed its stream")
            try:
                if (report := parts.join(read)) is None:
                    continue
                convert.check_report(report, self._slots, self._orders_sent, self._unsent_slots())
            except (convert.MalformedReport, BadParts) as error:
                raise ShardLost(str(error)) from error
            self._handle(report)

    def _unsent_slots(self) -> Set[int]:
        replicas = map(self._context.scheduler.replicas.get, self.ranks)
        return {slot for each in replicas if each is not None for slot in each.unsent_slots}

    def _request_in(self, slot: int) -> RequestId | None:
        return self._context.scheduler.request_in(self.ranks[slot * len(self.ranks) // self._slots], slot)

    def _handle(self, report: pb.StepReport) -> None:
        now = time.monotonic()
        self._reported, self._running, self._orders_applied = True, report.running, report.orders_applied
        self._longest_step_s = max(report.step_ns / 1e9, 0.99 * self._longest_step_s)
        context = self._context
        scheduler, listeners = context.scheduler, context.listeners
        steps = report.step - self._steps
        self._steps = report.step
        self.steps += steps
        self.step_seconds += report.step_ns / 1e9
        computed = bool(report.slots or report.prefilled_slots)
        self._timing.update(now, report.step_ns / 1e9, stepping=computed and report.running > 0)
        for scored in report.prompt_logprobs:
            listeners.prompt_logprobs(self._request_in(scored.slot), scored)
        for drafting in report.drafting:
            if drafting.source == PREDICTION:
                requests = map(self._request_in, drafting.slots)
                columns = drafting.slot_draft_tokens, drafting.slot_accepted_tokens
                listeners.predicted(zip(requests, *columns, strict=True))
        output = convert.step_output_from_pb(report, steps)
        self.new_tokens += len(output.token_ids)
        parsed = time.monotonic()
        parts = zip(self.ranks, convert.rank_outputs(output, len(self.ranks), self._slots), strict=True)
        deliveries, *others = [scheduler.update(rank, part, now) for rank, part in parts]
        for each in others:
            deliveries.extend(each)
        updated = time.monotonic()
        listeners.tokens(deliveries, output.token_ids, report)
        listeners.failures(deliveries.failed)
        delivered = time.monotonic()
        times = now, updated - parsed, delivered - updated
        context.observer.on_report(StepRecord(self._number, report, steps, deliveries, *times, listeners))
        if report.draining:
            self._stopping = True
            self._apply_health()
        if self._stopping or self._unwanted:  # each time: a load may have ended, or another replica joined
            scheduler.evacuate(self._number)  # engines with ranks have no host cache
        context.dispatch()
        self._boundary.set()
        if report.draining and self.is_empty:
            self.stopped = True
            raise ShardStopped("it has no sequences left")
        if any(map(scheduler.may_have_orders, self.ranks)):
            self._changed.set()


class OrderTiming:
    """Decides when to send orders to a replica that is in the middle of a step, from its last step durations.

    Orders take effect at the next step boundary however early they are sent, and a boundary applies one set of orders.
    If orders were sent at once, the first of several new requests would take the boundary for itself, and the others
    would wait a whole step more. So orders are held until half of the shortest recent step is over. Times are seconds
    of a monotonic clock.
    """

    def __init__(self) -> None:
        self._boundary = 0.0
        self._durations = (0.0, 0.0)
        self._stepping = False

    def update(self, now: float, step_s: float, *, stepping: bool) -> None:
        """Record that a step of `step_s` ended at `now`; `stepping`: the next one began."""
        self._boundary = now
        self._durations = (self._durations[1], step_s)
        self._stepping = stepping

    def hold(self, now: float) -> float:
        """Return the seconds to hold orders; 0 if they should be sent now."""
        step_s = min(self._durations)
        if not self._stepping or step_s < MIN_STEP_S:
            return 0.0
        return max(0.0, self._boundary + HOLD_SHARE * step_s - now)


def _losses(error: BaseException) -> list[ShardLost]:
    """Return how the shard was lost; nothing if `error`, or an error in the group, has another cause."""
    if isinstance(error, BaseExceptionGroup):
        inner = [_losses(each) for each in error.exceptions]
        return [loss for some in inner for loss in some] if all(inner) else []
    if isinstance(error, grpc.aio.AioRpcError):
        return [ShardLost(error.details() or str(error.code()))]
    return [error] if isinstance(error, ShardLost) else []
