"""One replica's session: the only task that asks the scheduler what it is to do. Decide, send; receive, apply, deliver.

    scheduler ──decide──► Orders ──► shard
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

from text_generation_proto.client import RunCall, ShardClient
from text_generation_proto.v1 import shard_pb2 as pb
from text_generation_router.scheduling.scheduler import Scheduler
from text_generation_router.scheduling.steps import Deliveries
from text_generation_router.shards.convert import orders_to_pb, outcome_from_pb
from text_generation_router.shards.join import Joined
from text_generation_router.shards.listeners import Listeners
from text_generation_router.shards.observer import Handled, StepObserver
from text_generation_router.shards.pace import Pace


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
        self._eos_token_ids: tuple[int, ...] = ()

    def wake(self) -> None:
        """There may be something to order."""
        self._changed.set()

    async def serve(self, client: ShardClient, joined: Joined) -> None:
        """One session, until cancelled. Raises ShardLost when the shard is gone."""
        shared = self._shared
        self._pace = Pace()
        self._steps = 0
        self._eos_token_ids = tuple(joined.info.eos_token_ids)
        call = client.run()
        opened = False
        try:
            await call.initial_metadata()  # the shard opened the session, or refused
            shared.observer.on_session(self._number)
            shared.listeners.failures(shared.scheduler.open(self._number, joined.spec, time.monotonic()).failed)
            opened = True
            shared.opened()
            shared.dispatch()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._send(call))
                tasks.create_task(self._receive(call))
                tasks.create_task(self._heed_health(client))
        except (grpc.aio.AioRpcError, BaseExceptionGroup) as error:
            reasons = _shard_loss(error)
            if not reasons:
                raise
            raise ShardLost(reasons[0]) from error
        finally:
            call.cancel()
            if opened:
                shared.listeners.failures(shared.scheduler.lose(self._number, time.monotonic()).failed)
                shared.dispatch()

    async def _heed_health(self, client: ShardClient) -> None:
        """Give the shard nothing new while it says that it does not serve."""
        with suppress(grpc.aio.AioRpcError):  # what ends the stream ends the session; no health service is no news
            async for serving in client.serving():
                self._shared.scheduler.drain(self._number, draining=not serving)
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
            if orders := shared.scheduler.decide(self._number, deciding):
                shared.observer.on_orders(orders, time.monotonic() - deciding)
                for admission in orders.admit:
                    shared.listeners.scheduled(admission)
                try:
                    await call.write(orders_to_pb(orders, self._eos_token_ids))
                except asyncio.InvalidStateError as error:  # gRPC's word for a stream that has ended
                    raise ShardLost("the shard's stream ended") from error
                # What was placed has been ordered: there may be room for more.
                shared.dispatch()

    async def _receive(self, call: RunCall) -> None:
        while True:
            report = await call.read()
            if not isinstance(report, pb.StepReport):
                raise ShardLost("the shard closed its stream")
            self._handle(report)

    def _handle(self, report: pb.StepReport) -> None:
        now = time.monotonic()
        shared = self._shared
        scheduler, listeners = shared.scheduler, shared.listeners
        steps = report.step - self._steps
        self._steps = report.step
        computed = bool(report.slots or report.prefilled_slots)
        self._pace.report(now, report.step_ns / 1e9, stepping=computed and report.running > 0)
        for scored in report.prompt_logprobs:
            listeners.prompt(scheduler.owner(self._number, scored.slot), scored)
        outcome = outcome_from_pb(report, steps)
        parsed = time.monotonic()
        deliveries: Deliveries = scheduler.apply(self._number, outcome, now)
        applied = time.monotonic()
        listeners.tokens(deliveries, outcome.token_ids, report)
        listeners.failures(deliveries.failed)
        delivered = time.monotonic()
        shared.observer.on_report(
            Handled(self._number, report, steps, deliveries, now, applied - parsed, delivered - applied, listeners)
        )
        shared.dispatch()
        self._boundary.set()
        if scheduler.wants_orders(self._number):
            self._changed.set()


def _shard_loss(error: BaseException) -> list[str]:
    """What an error, or each in a group, says of a lost shard; empty if it is about something else."""
    if isinstance(error, BaseExceptionGroup):
        return [reason for inner in error.exceptions for reason in _shard_loss(inner)]
    if isinstance(error, grpc.aio.AioRpcError):
        return [error.details() or str(error.code())]
    return [str(error)] if isinstance(error, ShardLost) else []
