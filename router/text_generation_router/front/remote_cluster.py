"""RemoteCluster: the replicas as an HTTP worker sees them, through its link to the scheduler process.

When the link is lost, the worker connects again and submits its unfinished requests with the tokens that they have. New
requests wait meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import accumulate, chain, count, repeat
from pathlib import Path
from typing import cast

import structlog
from google.protobuf.message import Message

from text_generation_proto import convert
from text_generation_proto.front import front_pb2 as pb
from text_generation_proto.values import FinishReason
from text_generation_router.errors import DeadlineExceeded, GenerationFailed, ServingError, Unhealthy
from text_generation_router.front.convert import info_from_json, refusal_from_pb, request_to_pb, text_to_pb
from text_generation_router.front.link import Link, LinkBroken
from text_generation_router.front.questions import Answerers, LinkLost, Questions
from text_generation_router.front.unfinished import UnfinishedRequest
from text_generation_router.request import Request, RequestId, TenantId, TokenId, TokenListener
from text_generation_router.shards.cluster_info import ClusterInfo
from text_generation_router.shards.convert import logprobs_to_json, top_tokens
from text_generation_router.shards.join import ReplicaInfo
from text_generation_router.shards.listeners import Listeners

RECORDED_AT_ONCE = 1 << 11
"""New tokens that are recorded at once, for requests that are to be submitted again."""
CONNECT_EVERY_S = 0.05
"""Seconds between two attempts to connect."""
WITHOUT_LINK_S = 30.0
"""Seconds without a link for which requests wait."""
MAX_UNSENT_BYTES = 1 << 30
"""Bytes that the scheduler process has not read, all requests submitted again included; then the connection is cut off."""
WATCH_EVERY_S = 0.1
"""Seconds between two looks at the deadlines of requests, while there is no link."""
HANGS_AFTER_S = 1.0
"""Seconds after a deadline at which a request ends although the scheduler process, which may hang, has not ended it."""
ABANDONED_AFTER_S = 5.0
"""Seconds without a link, or without a shard, after which a worker that stops gives its requests up."""

log = structlog.get_logger()


def request_ids(worker: int) -> Iterator[RequestId]:
    """Yield numbers that no other worker has, and this one had not before a restart."""
    return map(RequestId, count((worker << 56) + time.time_ns() // 1000))


class RemoteCluster:
    """The replicas behind the scheduler process; a ServingCluster."""

    def __init__(self, path: Path, worker: int, answerers: Answerers) -> None:
        """`path` is the Unix socket of the scheduler process, `worker` the number of this one; `answerers` answer it."""
        self.stopping = False
        self.draining = False
        self.ids = request_ids(worker)
        self._path = path
        self._worker = worker
        self._state = pb.State()
        self._model: ReplicaInfo | None = None
        self._link: Link[pb.FromScheduler] | None = None
        """None without a connection."""
        self._linked = asyncio.Event()
        """Set while there is a connection, from its first State on."""
        self._lost = asyncio.Event()
        """Set while there is none."""
        self._lost_at = time.monotonic()
        self._live: dict[RequestId, UnfinishedRequest] = {}
        """By the number under which a request was submitted last."""
        self._renumbered: dict[RequestId, RequestId] = {}
        """That number, of requests that were submitted again."""
        self._listeners = Listeners(partial(self._cancel, satisfied=True))
        self._closed = False
        self._unrecorded: list[tuple[Sequence[RequestId], Sequence[int], Sequence[TokenId]]] = []
        """Requests, numbers of their tokens (none: one each), and tokens, that are in no record of a request yet."""
        self._unrecorded_tokens = 0
        self._questions = Questions(self._send, pb.FromWorker, answerers)
        self._held: dict[int, pb.TakePermits] = {}
        """Permits that this worker holds."""

    # ----------------------------------------------------------------------------------------------------- the cluster

    def submit(self, request: Request, listener: TokenListener) -> None:
        """Queue `request`; `listener` gets its tokens, or its refusal. Without a link it waits for one.

        Raises Unhealthy if the worker stops.
        """
        if self._closed:
            raise Unhealthy("the server was stopped")
        self._live[request.id] = live = UnfinishedRequest(request)
        self._listeners.add(request.id, listener)
        if self._linked.is_set():
            self._submit(request.id, live)

    def cancel(self, request_id: RequestId) -> None:
        """Cancel a request; no-op if it is unknown or ended."""
        self._cancel(self._renumbered.pop(request_id, request_id), satisfied=False)

    def give_up(self, reason: str) -> None:
        """End all requests with an error, and accept no new ones."""
        self._closed = True
        for number in list(self._live):
            self._send(pb.FromWorker(cancel=pb.Cancel(request=number)))
        self._end_all(GenerationFailed(reason))

    async def info(self) -> ClusterInfo:
        """Return the state of the replicas. Raises Unhealthy."""
        return info_from_json(await self.ask("info"))

    @property
    def adapters(self) -> Collection[str]:
        """The names of the LoRA adapters that replicas hold."""
        return self._state.adapters

    @property
    def ready(self) -> bool:
        """True if a replica gets new requests now, and the scheduler process can be reached."""
        return self._linked.is_set() and self._state.ready and not self._state.stopping

    @property
    def live_requests(self) -> int:
        """The number of requests that have not ended."""
        return len(self._live)

    @property
    def status(self) -> str:
        """The state of the replicas, for the service manager."""
        return self._state.status if self._linked.is_set() else "waiting for the scheduler process"

    async def opened(self) -> None:
        """Wait for a link."""
        await self._linked.wait()

    async def settled(self) -> None:
        """Wait for a link: the scheduler process accepts workers once it is settled."""
        await self._linked.wait()

    async def abandoned(self) -> None:
        """Wait until there was no link, or no shard, for ABANDONED_AFTER_S."""
        since = time.monotonic()
        while time.monotonic() - since < ABANDONED_AFTER_S:
            await asyncio.sleep(ABANDONED_AFTER_S / 50)
            if self._linked.is_set() and not self._state.shards_stopped:
                since = time.monotonic()

    # --------------------------------------------------------------------------------------------- permits and questions

    async def ask(self, about: str, body: bytes = b"") -> bytes:
        """Return the answer of the scheduler process to a question. Raises ServingError."""
        while True:
            await self._wait_for_link()
            with suppress(LinkLost):
                return await self._questions.ask(about, body)

    async def hold_permits(self, count: int, tenant: TenantId, by: float | None) -> int:
        """Hold permits until `give_permits` with the returned number.

        Raises Overloaded, InvalidRequest, Unhealthy, or DeadlineExceeded at the time `by`.
        """
        try:
            async with asyncio.timeout_at(by):
                return await self._hold_permits(count, tenant)
        except TimeoutError:
            raise DeadlineExceeded("its time was over before it was queued") from None

    async def _hold_permits(self, count: int, tenant: TenantId) -> int:
        asked = pb.TakePermits(count=count, tenant=text_to_pb(tenant))

        def take(number: int) -> pb.FromWorker:
            asked.number = number
            return pb.FromWorker(take_permits=asked)

        while True:
            await self._wait_for_link()
            try:
                await self._questions.send(take)
            except LinkLost:
                continue
            except asyncio.CancelledError:
                self.give_permits(asked.number)
                raise
            self._held[asked.number] = asked
            return asked.number

    def give_permits(self, number: int) -> None:
        """Give permits back."""
        self._held.pop(number, None)
        self._send(pb.FromWorker(give_permits=pb.GivePermits(number=number)))

    async def _wait_for_link(self) -> None:
        if self._linked.is_set():
            return
        try:
            async with asyncio.timeout_at(self._lost_at + WITHOUT_LINK_S):
                await self._linked.wait()
        except TimeoutError:
            raise Unhealthy("the scheduler process does not answer") from None

    # -------------------------------------------------------------------------------------------------------- requests

    def _cancel(self, number: RequestId, *, satisfied: bool) -> None:
        self._listeners.remove(number)
        if self._live.pop(number, None) is not None:
            self._send(pb.FromWorker(cancel=pb.Cancel(request=number, satisfied=satisfied)))

    def _end_all(self, error: ServingError) -> None:
        self._live.clear()
        self._renumbered.clear()
        self._listeners.end_all(error)

    def _deliver(self, report: pb.Report) -> None:
        listeners, live = self._listeners, self._live
        if report.placements:
            self._record()
        for placed in report.placements:
            if (request := live.get(RequestId(placed.request))) is not None:
                request.placed_with = len(request.generated)
                listeners.placed(RequestId(placed.request), placed.cached_tokens, placed.replica)
        if report.lost:
            self._lose(map(RequestId, report.lost))
        for each in report.prompt_logprobs:
            if (request := live.get(RequestId(each.request))) is not None and not request.scored:
                request.scored = True
                listeners.prompt_logprobs(RequestId(each.request), each.scored)
        listeners.cached(zip(map(RequestId, report.cached_requests), report.cached_tokens, strict=True))
        if report.requests:
            self._deliver_tokens(report)
        for failure in report.failures:
            if live.pop(RequestId(failure.request), None) is not None:
                listeners.failure(RequestId(failure.request), refusal_from_pb(failure.refusal))

    def _deliver_tokens(self, report: pb.Report) -> None:
        token_ids, requests = list(report.token_ids), cast("Sequence[RequestId]", report.requests)
        ends: Sequence[int] = list(accumulate(report.token_counts)) or range(1, len(token_ids) + 1)
        reasons: list[FinishReason | None] = [None] * len(requests)
        for index, reason in zip(report.finished, report.reasons, strict=True):
            reasons[index] = convert.FINISH_REASONS_FROM_PB[reason]
            self._live.pop(requests[index], None)
        tops = {top.index: top_tokens(top.token_ids, top.logprobs) for top in report.top_tokens}
        delivered = zip(requests, (0, *ends), ends, reasons, strict=False)
        self._listeners.columns(delivered, token_ids, logprobs_to_json(report.logprobs), tops)
        # The record of each request is not in the processor's cache: it is touched for many tokens at once.
        self._unrecorded.append((requests, report.token_counts, token_ids))
        self._unrecorded_tokens += len(token_ids)
        if self._unrecorded_tokens >= RECORDED_AT_ONCE:
            self._record()

    def _record(self) -> None:
        """Record the new tokens of live requests."""
        for requests, counts, token_ids in self._unrecorded:
            owners = chain.from_iterable(map(repeat, requests, counts)) if counts else requests
            for request_id, token_id in zip(owners, token_ids, strict=True):
                if (live := self._live.get(request_id)) is not None:
                    live.generated.append(token_id)
        self._unrecorded.clear()
        self._unrecorded_tokens = 0

    # ------------------------------------------------------------------------------------------------------------ link

    async def joined(self) -> ReplicaInfo:
        """Connect, and return the description of the model. Waits as long as it takes."""
        while self._model is None:
            await self._connect()
        return self._model

    async def run(self) -> None:
        """Keep the link until cancelled, then end all requests with an error."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._watch_deadlines())
                while True:
                    await self._lost.wait()
                    await self._connect()
        finally:
            self._closed = True
            self._end_all(GenerationFailed("the server was stopped"))
            if self._link is not None:
                self._link.close()

    async def _connect(self) -> None:
        """Try to connect until there is a link."""
        loop = asyncio.get_running_loop()
        while not self._linked.is_set():
            self._lost.clear()
            try:
                await loop.create_unix_connection(self._new_link, str(self._path))
            except OSError:
                await asyncio.sleep(CONNECT_EVERY_S)
            else:
                await self._linked_or_lost()

    async def _linked_or_lost(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            events = [tasks.create_task(event.wait()) for event in (self._linked, self._lost)]
            await asyncio.wait(events, return_when=asyncio.FIRST_COMPLETED)
            for event in events:
                event.cancel()

    def _new_link(self) -> Link[pb.FromScheduler]:
        self._link = Link(pb.FromScheduler, self._handle, self._on_open, self._on_end, MAX_UNSENT_BYTES)
        return self._link

    def _send(self, message: Message) -> None:
        if self._link is not None:
            self._link.send(message)

    def _on_open(self) -> None:
        self._send(pb.FromWorker(hello=pb.Hello(worker=self._worker, held=self._held.values())))

    def _on_end(self) -> None:
        if self._linked.is_set():
            self._lost_at = time.monotonic()
            if not self._closed:
                log.warning("link to the scheduler process lost", requests=len(self._live))
        self._link = None
        self._linked.clear()
        self._lost.set()
        self._lose(self._live)
        self._questions.end()

    def _lose(self, numbers: Iterable[RequestId]) -> None:
        """Count the loss of the replicas of some requests."""
        self._record()
        self._listeners.moved([each for each in numbers if each in self._live and self._live[each].lost()])

    def _handle(self, message: pb.FromScheduler) -> None:
        kind = message.WhichOneof("kind")
        if kind == "report":
            self._deliver(message.report)
        elif kind == "answer":
            self._questions.answered(message.answer)
        elif kind == "state":
            self._state = message.state
            if message.state.HasField("info"):
                self._model = ReplicaInfo(message.state.info, message.state.pool)
                self._linked.set()
                self._submit_again()
        elif kind == "question":
            self._questions.answer(message.question)
        else:
            raise LinkBroken("an unknown message")

    def _submit_again(self) -> None:
        """Submit the requests that have not ended to a new scheduler process, or again to the same one.

        They get new numbers: those before may still be known there, as cancelled.
        """
        requests, self._live = self._live, {}
        for before, live in requests.items():
            number = next(self.ids)
            self._live[number] = live
            self._renumbered[live.request.id] = number
            self._listeners.renumber(before, number)
            self._submit(number, live)
        if requests:
            log.info("requests submitted again", requests=len(requests))

    def _submit(self, number: RequestId, live: UnfinishedRequest) -> None:
        request = live.request
        if live.scored:
            request = replace(request, logprobs=request.logprobs.without_prompt())
        self._send(pb.FromWorker(submit=request_to_pb(request, number, live.progress)))
        live.accepted = True

    async def _watch_deadlines(self) -> None:
        """End requests that are late while the scheduler process cannot do it, and all after WITHOUT_LINK_S."""
        while True:
            if self._linked.is_set():
                with suppress(TimeoutError):
                    async with asyncio.timeout(HANGS_AFTER_S):
                        await self._lost.wait()
            else:
                await asyncio.sleep(WATCH_EVERY_S)
            now = time.monotonic()
            linked = self._linked.is_set()
            if not linked and now > self._lost_at + WITHOUT_LINK_S:
                self._end_all(Unhealthy("the scheduler process does not answer"))
            latest = now - HANGS_AFTER_S if linked else now
            for number, live in [each for each in self._live.items() if each[1].due <= latest]:
                self._record()
                self._listeners.failure(number, live.expired())
                self._cancel(number, satisfied=False)
