"""One replica: the only task that touches its scheduler. Decide, send; receive, apply, deliver.

submit, cancel ──► Scheduler ──decide──► Orders ──► shard
listeners ◄──deliver── Scheduler ◄──apply── StepReport ◄──┘
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress

import grpc
import structlog

from text_generation_proto.client import RunCall, ShardClient
from text_generation_proto.v1 import shard_pb2 as pb
from text_generation_router.errors import GenerationFailed
from text_generation_router.request import Request, RequestId, TokenListener, TopToken
from text_generation_router.scheduling.scheduler import Scheduler
from text_generation_router.scheduling.steps import Deliveries, FailureKind
from text_generation_router.shards.convert import (
    logprobs_to_json,
    orders_to_pb,
    outcome_from_pb,
    prompt_tops_from_pb,
    top_tokens_from_pb,
)
from text_generation_router.shards.observer import Handled, StepObserver
from text_generation_router.shards.pace import Pace

log = structlog.get_logger()


class ShardLost(Exception):
    """The shard's stream ended: the process died, hung up, or cannot be reached."""


class Replica:
    """A shard, its scheduler, and who listens to which request."""

    def __init__(
        self,
        client: ShardClient,
        scheduler: Scheduler,
        eos_token_ids: Sequence[int],
        observer: StepObserver,
    ) -> None:
        self._client = client
        self._scheduler = scheduler
        self._eos_token_ids = tuple(eos_token_ids)
        self._observer = observer
        self._listeners: dict[RequestId, TokenListener] = {}
        self._pace = Pace()
        self._changed = asyncio.Event()
        """Something happened that may call for orders."""
        self._boundary = asyncio.Event()
        """A report came."""
        self._opened = asyncio.Event()
        self._lost = False

    # ------------------------------------------------------------------------------------------------- for the router

    def submit(self, request: Request, listener: TokenListener) -> None:
        """Queue `request`; `listener` hears of it until its end or `cancel`."""
        if not self.connected:
            listener.on_failure(GenerationFailed("the shard is lost"))
            return
        self._listeners[request.id] = listener
        self._scheduler.submit(request)
        self._changed.set()

    def cancel(self, request_id: RequestId) -> None:
        """Nobody waits for this request any more; idempotent, also after its end."""
        if self._listeners.pop(request_id, None) is not None:
            self._scheduler.cancel(request_id)
            self._changed.set()

    async def opened(self) -> None:
        """Return once requests can be submitted, or can no longer be."""
        await self._opened.wait()

    @property
    def connected(self) -> bool:
        """Whether the shard's stream is open."""
        return self._opened.is_set() and not self._lost

    @property
    def scheduler(self) -> Scheduler:
        """For figures only."""
        return self._scheduler

    # ------------------------------------------------------------------------------------------------------- the loops

    async def run(self) -> None:
        """Serve until cancelled. Raises ShardLost when the shard is gone; every request has then heard of it."""
        call = self._client.run()
        end = "the server was stopped"
        try:
            await call.initial_metadata()  # the shard opened the session, or refused
            self._opened.set()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._send(call))
                tasks.create_task(self._receive(call))
        except (grpc.aio.AioRpcError, BaseExceptionGroup) as error:
            reasons = _shard_loss(error)
            if not reasons:
                raise
            end = "the shard was lost"
            raise ShardLost(reasons[0]) from error
        finally:
            self._lost = True
            self._opened.set()
            call.cancel()
            listeners, self._listeners = self._listeners, {}
            for listener in listeners.values():
                listener.on_failure(GenerationFailed(end))

    async def _send(self, call: RunCall) -> None:
        while True:
            await self._changed.wait()
            if (hold := self._pace.hold(time.monotonic())) > 0:
                self._boundary.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(hold):
                        await self._boundary.wait()
            self._changed.clear()
            deciding = time.monotonic()
            if orders := self._scheduler.decide():
                self._observer.on_orders(orders, time.monotonic() - deciding)
                for admission in orders.admit:
                    if listener := self._listeners.get(admission.request.id):
                        listener.on_scheduled()
                try:
                    await call.write(orders_to_pb(orders, self._eos_token_ids))
                except asyncio.InvalidStateError as error:  # gRPC's word for a stream that has ended
                    raise ShardLost("the shard's stream ended") from error

    async def _receive(self, call: RunCall) -> None:
        while True:
            report = await call.read()
            if not isinstance(report, pb.StepReport):
                raise ShardLost("the shard closed its stream")
            self._handle(report)

    def _handle(self, report: pb.StepReport) -> None:
        now = time.monotonic()
        stepped = bool(report.slots or report.prefilled_slots)
        self._pace.report(now, report.step_ns / 1e9, stepping=stepped and report.running > 0)
        for scored in report.prompt_logprobs:
            self._deliver_prompt(scored)
        outcome = outcome_from_pb(report)
        parsed = time.monotonic()
        deliveries = self._scheduler.apply(outcome)
        applied = time.monotonic()
        self._deliver(deliveries, outcome.token_ids, report)
        delivered = time.monotonic()
        self._observer.on_report(
            Handled(report, deliveries, now, applied - parsed, delivered - applied, self._listeners)
        )
        self._boundary.set()
        if self._scheduler.wants_orders:
            self._changed.set()

    def _deliver_prompt(self, scored: pb.PromptLogprobs) -> None:
        owner = self._scheduler.owner(scored.slot)
        if owner is None or (listener := self._listeners.get(owner)) is None:
            return
        try:
            listener.on_prompt_logprobs(logprobs_to_json(scored.logprobs), prompt_tops_from_pb(scored))
        except Exception as error:  # noqa: BLE001 - a listener's bug costs its own request, not the replica
            self._listener_failed(owner, listener, error)

    def _listener_failed(self, request_id: RequestId, listener: TokenListener, error: Exception) -> None:
        log.error("listener failed", request_id=request_id, exc_info=error)
        self.cancel(request_id)
        listener.on_failure(GenerationFailed("internal error"))

    def _deliver(self, deliveries: Deliveries, token_ids: Sequence[int], report: pb.StepReport) -> None:
        logprobs = logprobs_to_json(report.logprobs)
        tops = top_tokens_from_pb(report) if report.top_tokens else {}
        nothing: list[TopToken] = []
        listeners = self._listeners
        for request_id, first, end, reason in deliveries.tokens:
            listener = listeners.get(request_id)
            if listener is None:
                continue
            try:
                for at in range(first, end):
                    last = reason if at == end - 1 else None
                    goes_on = listener.on_token(token_ids[at], logprobs[at], tops.get(at, nothing), last)
                    if last is not None:
                        del listeners[request_id]
                    elif not goes_on:
                        self.cancel(request_id)
                        break
            except Exception as error:  # noqa: BLE001 - a listener's bug costs its own request, not the replica
                self._listener_failed(request_id, listener, error)
        for failed in deliveries.failed:
            if listener := listeners.pop(failed.request_id, None):
                log.warning(
                    "request failed", request_id=failed.request_id, kind=failed.kind.value, reason=failed.message
                )
                listener.on_failure(GenerationFailed(_client_message(failed.kind, failed.message)))


def _shard_loss(error: BaseException) -> list[str]:
    """What an error, or each in a group, says of a lost shard; empty if it is about something else."""
    if isinstance(error, BaseExceptionGroup):
        return [reason for inner in error.exceptions for reason in _shard_loss(inner)]
    if isinstance(error, grpc.aio.AioRpcError):
        return [error.details() or str(error.code())]
    return [str(error)] if isinstance(error, ShardLost) else []


def _client_message(kind: FailureKind, message: str) -> str:
    """What a client is told: the engine's own words only where they are about the client's request."""
    if kind is FailureKind.STEP:
        return "the step that computed this request failed"
    return message
