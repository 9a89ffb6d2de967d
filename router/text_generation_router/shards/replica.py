"""One replica's session: the only task that asks the scheduler what it is to do. Decide, send; receive, apply, deliver.

    scheduler ──decide──► SchedulerOutput ──► shard
    listeners ◄──deliver── scheduler ◄──apply── StepReport ◄──┘

A session lasts as long as the shard's stream. When that breaks the replica is lost to the scheduler, which gives what ran
there to others, or to the same replica's next session.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import grpc
import structlog

from text_generation_proto.client import RunCall, ShardClient
from text_generation_proto.v1 import shard_pb2 as pb
from text_generation_router.scheduling.messages import Deliveries
from text_generation_router.scheduling.scheduler import Scheduler
from text_generation_router.shards.convert import MalformedReport, check_report, orders_to_pb, outcome_from_pb
from text_generation_router.shards.join import Joined
from text_generation_router.shards.listeners import Listeners
from text_generation_router.shards.observer import Handled, StepObserver
from text_generation_router.shards.pace import Pace

LOOK_EVERY_S = 1.0
HANGS_AFTER_S = 5.0
HANGS_AFTER_STEPS = 20
"""A shard that owes a report for so long, and for so many times its longest step of late, gets nothing new until it
brings one. gRPC's keepalive finds out whether it is dead."""

log = structlog.get_logger()


class ShardLost(Exception):
    """The shard's stream ended: the process died, hung up, or cannot be reached."""


@dataclass(frozen=True, slots=True)
class Shared:
    """What all replicas work with."""

    scheduler: Scheduler
    listeners: Listeners
    observer: StepObserver
    dispatch: Callable[[], None]
    """Gives queued requests to replicas that have room, and wakes these."""
    opened: Callable[[], None]
    """Told of each session that begins."""


class Replica:
    """A replica's place, through all its sessions."""

    def __init__(self, number: int, shared: Shared) -> None:
        self._number = number
        self._shared = shared
        self._changed = asyncio.Event()
        """Something happened that may call for orders."""
        self._boundary = asyncio.Event()
        """A report came."""
        self._pace = Pace()
        self._steps = 0
        """Steps of the session so far."""
        self._slots = 0
        self._orders_sent = self._applied = 0
        """Numbers of the last orders sent, and of the last that were applied."""
        self._running = 0
        """Sequences that the shard holds."""
        self._heard = 0.0
        """When the last report came."""
        self._longest_step_s = 0.0
        """Of late."""
        self._serving, self._hangs = True, False
        self._eos_token_ids: tuple[int, ...] = ()
        self._own_cache = False
        """Its engine keeps a prefix cache itself."""

    def wake(self) -> None:
        """There may be something to order."""
        self._changed.set()

    async def serve(self, client: ShardClient, joined: Joined) -> None:
        """One session, until cancelled. Raises ShardLost when the shard is gone."""
        shared = self._shared
        self._pace = Pace()
        self._steps = self._orders_sent = 0
        self._running = self._applied = 0
        self._longest_step_s, self._heard = 0.0, time.monotonic()
        self._serving, self._hangs = True, False
        self._slots = joined.spec.num_slots
        self._eos_token_ids = tuple(joined.info.eos_token_ids)
        self._own_cache = joined.spec.self_scheduling
        call = client.run()
        opened = False
        try:
            await call.initial_metadata()  # the shard opened the session, or refused
            shared.observer.on_session(self._number)
            shared.listeners.failures(shared.scheduler.open(self._number, joined.spec).failed)
            opened = True
            shared.opened()
            shared.dispatch()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._send(call))
                tasks.create_task(self._receive(call))
                tasks.create_task(self._heed_health(client))
                tasks.create_task(self._heed_silence())
        except (grpc.aio.AioRpcError, BaseExceptionGroup) as error:
            reasons = _shard_loss(error)
            if not reasons:
                raise
            raise ShardLost(reasons[0]) from error
        finally:
            call.cancel()
            shared.observer.on_loss(self._number)
            if opened:
                shared.listeners.failures(shared.scheduler.lose(self._number).failed)
                shared.dispatch()

    async def _heed_health(self, client: ShardClient) -> None:
        """Give the shard nothing new while it says that it does not serve."""
        with suppress(grpc.aio.AioRpcError):  # what ends the shard ends the session; no health service is no news
            async for serving in client.serving():
                self._heed(serving=serving)
        self._heed(serving=True)  # nobody would say when it serves again

    async def _heed_silence(self) -> None:
        """Give the shard nothing new while it owes a report and brings none: it may hang."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            silent = time.monotonic() - self._heard
            busy = self._running > 0 or self._applied < self._orders_sent
            self._heed(hangs=busy and silent > max(HANGS_AFTER_S, HANGS_AFTER_STEPS * self._longest_step_s))

    def _heed(self, *, serving: bool | None = None, hangs: bool | None = None) -> None:
        before = self._serving and not self._hangs
        self._serving = self._serving if serving is None else serving
        self._hangs = self._hangs if hangs is None else hangs
        good = self._serving and not self._hangs
        if good != before:
            log.warning(
                "shard gets requests again" if good else "shard gets nothing new",
                replica=self._number,
                serving=self._serving,
                hangs=self._hangs,
            )
            self._shared.scheduler.drain(self._number, draining=not good)
            self._shared.dispatch()

    async def _send(self, call: RunCall) -> None:
        shared = self._shared
        while True:
            await self._changed.wait()
            if (hold := self._pace.hold(time.monotonic())) > 0:
                self._boundary.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(hold):
                        await self._boundary.wait()
            self._changed.clear()
            deciding = time.monotonic()
            if orders := shared.scheduler.schedule(self._number):
                self._orders_sent = orders.number
                shared.observer.on_orders(orders, time.monotonic() - deciding)
                for admission in orders.placements:
                    shared.listeners.scheduled(admission)
                try:
                    await call.write(orders_to_pb(orders, self._eos_token_ids, own_cache=self._own_cache))
                except asyncio.InvalidStateError as error:  # gRPC's word for a stream that has ended
                    raise ShardLost("the shard's stream ended") from error
                # What was placed has been ordered: there may be room for more.
                shared.dispatch()

    async def _receive(self, call: RunCall) -> None:
        while True:
            report = await call.read()
            if not isinstance(report, pb.StepReport):
                raise ShardLost("the shard closed its stream")
            try:
                check_report(report, self._slots, self._orders_sent)
            except MalformedReport as error:
                raise ShardLost(str(error)) from error
            self._handle(report)

    def _handle(self, report: pb.StepReport) -> None:
        now = time.monotonic()
        self._heard, self._running, self._applied = now, report.running, report.orders_applied
        self._longest_step_s = max(report.step_ns / 1e9, 0.99 * self._longest_step_s)
        shared = self._shared
        scheduler, listeners = shared.scheduler, shared.listeners
        steps = report.step - self._steps
        self._steps = report.step
        computed = bool(report.slots or report.prefilled_slots)
        self._pace.report(now, report.step_ns / 1e9, stepping=computed and report.running > 0)
        for scored in report.prompt_logprobs:
            listeners.prompt(scheduler.request_in(self._number, scored.slot), scored)
        outcome = outcome_from_pb(report, steps)
        parsed = time.monotonic()
        deliveries: Deliveries = scheduler.update(self._number, outcome, now)
        applied = time.monotonic()
        listeners.tokens(deliveries, outcome.token_ids, report)
        listeners.failures(deliveries.failed)
        delivered = time.monotonic()
        shared.observer.on_report(
            Handled(self._number, report, steps, deliveries, now, applied - parsed, delivered - applied, listeners)
        )
        shared.dispatch()
        self._boundary.set()
        if scheduler.may_have_orders(self._number):
            self._changed.set()


def _shard_loss(error: BaseException) -> list[str]:
    """What an error, or each in a group, says of a lost shard; empty if one of them is about something else."""
    if isinstance(error, BaseExceptionGroup):
        reasons = [_shard_loss(inner) for inner in error.exceptions]
        return [reason for some in reasons for reason in some] if all(reasons) else []
    if isinstance(error, grpc.aio.AioRpcError):
        return [error.details() or str(error.code())]
    return [str(error)] if isinstance(error, ShardLost) else []
