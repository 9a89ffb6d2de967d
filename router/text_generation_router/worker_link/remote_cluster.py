"""RemoteCluster: the replicas as an HTTP worker sees them, through its link to the scheduler process.

When the link is lost, the worker connects again and submits its unfinished requests with the tokens that they have. New
requests wait meanwhile. UnfinishedRequest is the record of a request by which it goes on in another scheduler process.
"""

import asyncio
import time
from array import array
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, chain, count, repeat
from pathlib import Path
from typing import cast

import orjson

from text_generation_common.log import log
from text_generation_common.waiting import holds_for
from text_generation_proto import convert
from text_generation_proto.client import LOAD_S
from text_generation_proto.values import FinishReason
from text_generation_proto.worker_link import worker_link_pb2 as pb
from text_generation_router.cluster_interface import ClusterInterface
from text_generation_router.errors import DeadlineExceeded, GenerationFailed, ServingError, Unhealthy
from text_generation_router.request import (
    NO_MOVES,
    Moves,
    Request,
    RequestId,
    RequestProgress,
    TokenId,
    TokenListener,
)
from text_generation_router.shards.cluster import ClusterInfo
from text_generation_router.shards.convert import logprobs_to_json, top_tokens
from text_generation_router.shards.listeners import Listeners
from text_generation_router.worker_link.convert import (
    INFO,
    SET_ADAPTER,
    info_from_json,
    refusal_from_pb,
    request_to_pb,
)
from text_generation_router.worker_link.rpc import Handlers
from text_generation_router.worker_link.scheduler_link import NO_ANSWER, WITHOUT_LINK_S, SchedulerLink

RECORDED_AT_ONCE = 1 << 11
"""New tokens that are recorded at once, for requests that are to be submitted again."""
WATCH_EVERY_S = 0.1
"""Seconds between two looks at the deadlines of requests, while there is no link."""
OVERDUE_S = 1.0
"""Seconds after its deadline at which a request ends although the scheduler process, which may hang, has not ended it."""
UNLOAD_AFTER_S = 2.0
"""Seconds after a loss in which all workers connect again: the requests of an adapter that is unloaded then are known."""
ABANDONED_AFTER_S = 5.0
"""Seconds without a link, or without a shard, after which a worker that stops gives its requests up."""


@dataclass(slots=True, eq=False)
class UnfinishedRequest:
    request: Request
    accepted: bool = False
    """It was sent to a scheduler process."""
    generated: "array[int]" = field(default_factory=lambda: array("I"))
    moves: Moves = NO_MOVES
    generated_when_placed: int | None = None
    """New tokens at its last placement; None while it has no replica."""
    scored: bool = False
    """The log-probabilities of its prompt were delivered."""

    @property
    def progress(self) -> RequestProgress | None:
        """The progress for the next scheduler process; None if it was sent to none before."""
        return RequestProgress(self.generated, self.moves) if self.accepted else None

    @property
    def has_run(self) -> bool:
        """True if it has left the queue."""
        return self.generated_when_placed is not None or self.moves.total > 0

    @property
    def due(self) -> float:
        return self.request.qos.expires(queued=not self.has_run)

    def count_loss(self) -> bool:
        """Count the loss of its replica, or of the link; False if it had no replica."""
        if self.generated_when_placed is None:
            return False
        self.moves = self.moves.after_loss(advanced=len(self.generated) > self.generated_when_placed)
        self.generated_when_placed = None
        return True

    def expired(self) -> DeadlineExceeded:
        """Return the error of a request that is late."""
        return DeadlineExceeded(self.request.qos.late(len(self.generated), queued=not self.has_run))


def request_ids(worker: int) -> Iterator[RequestId]:
    """Yield numbers that no other worker has, and this one had not before a restart."""
    return map(RequestId, count((worker << 56) + time.time_ns() // 1000))


class RemoteCluster(ClusterInterface):
    def __init__(self, path: Path, worker: int, handlers: Handlers) -> None:
        """`path` is the Unix socket of the scheduler process, `worker` the number of this one; `handlers` answer it."""
        self.stopping = self.draining = False
        self.ids = request_ids(worker)
        self.link = SchedulerLink(path, worker, handlers, self._submit_again, self._deliver, self._link_lost)
        self._live: dict[RequestId, UnfinishedRequest] = {}
        """By the number under which a request was submitted last."""
        self._renumbered: dict[RequestId, RequestId] = {}
        """That number, of requests that were submitted again."""
        self._listeners = Listeners(partial(self._cancel, satisfied=True))
        self._closed = False
        self._unloading: set[str] = set()
        """Adapters that were being unloaded when the link was lost."""
        self._unrecorded: list[tuple[Sequence[RequestId], Sequence[int], Sequence[TokenId]]] = []
        """Requests, numbers of their tokens (none: one each), and tokens, that are in no record of a request yet."""
        self._unrecorded_tokens = 0

    def submit(self, request: Request, listener: TokenListener) -> None:
        """Queue `request`; `listener` gets its tokens, or its refusal. Without a link it waits for one.

        Raises Unhealthy if the worker stops.
        """
        if self._closed:
            raise Unhealthy("the server was stopped")
        self._live[request.id] = live = UnfinishedRequest(request)
        self._listeners.add(request.id, listener)
        if self.link.up.is_set():
            self._submit(request.id, live)

    def cancel(self, request_id: RequestId) -> None:
        self._cancel(self._renumbered.pop(request_id, request_id), satisfied=False)

    def give_up(self, reason: str) -> None:
        self._closed = True
        for number in self._live:
            self.link.send(pb.FromWorker(cancel=pb.Cancel(request=number)))
        self._end_all(GenerationFailed(reason))

    async def info(self) -> ClusterInfo:
        return info_from_json(await self.link.call(INFO))

    async def set_adapter(self, name: str, path: str | None) -> None:
        await self.link.call(SET_ADAPTER, name, path, timeout_s=LOAD_S)

    @property
    def adapters(self) -> Collection[str]:
        return self.link.state.adapters

    @property
    def ready(self) -> bool:
        return self.link.up.is_set() and self.link.state.ready and not self.link.state.stopping

    @property
    def live_requests(self) -> int:
        return len(self._live)

    @property
    def status(self) -> str:
        return self.link.state.status if self.link.up.is_set() else "waiting for the scheduler process"

    async def opened(self) -> None:
        await self.link.up.wait()

    settled = opened  # the scheduler process accepts workers once it is settled

    async def abandoned(self) -> None:
        """Wait until there was no link, or no shard, for ABANDONED_AFTER_S."""
        await holds_for(ABANDONED_AFTER_S, lambda: not self.link.up.is_set() or self.link.state.shards_stopped)

    async def run(self) -> None:
        """Keep the link until cancelled, then end all requests with an error."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._watch_deadlines())
                tasks.create_task(self.link.run())
        finally:
            self._closed = True
            self._end_all(GenerationFailed("the server was stopped"))
            self.link.close()

    def _submit(self, number: RequestId, live: UnfinishedRequest) -> None:
        request = live.request
        if live.scored:
            request = replace(request, logprobs=request.logprobs.without_prompt())
        images = [each.image.data for each in request.media]
        self.link.send(pb.FromWorker(submit=request_to_pb(request, number, live.progress)), images)
        live.accepted = True

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
        for name in self._unloading.intersection(self.adapters):
            # No reply is awaited: 0 is the number of no other call.
            call = pb.FromWorker(call=pb.Call(method=SET_ADAPTER, arguments=orjson.dumps([name, None])))
            asyncio.get_running_loop().call_later(UNLOAD_AFTER_S, self.link.send, call)
        if requests:
            log.info("requests submitted again", requests=len(requests))

    def _cancel(self, number: RequestId, *, satisfied: bool) -> None:
        self._listeners.remove(number)
        if self._live.pop(number, None) is not None:
            self.link.send(pb.FromWorker(cancel=pb.Cancel(request=number, satisfied=satisfied)))

    def _end_all(self, error: ServingError) -> None:
        self._live.clear()
        self._renumbered.clear()
        self._listeners.end_all(error)

    def _link_lost(self) -> None:
        if not self._closed:
            log.warning("link to the scheduler process lost", requests=len(self._live))
        self._unloading = {live.request.adapter for live in self._live.values()} - {"", *self.adapters}
        self._lose(self._live)

    def _lose(self, numbers: Iterable[RequestId]) -> None:
        """Record that these requests lost their replica."""
        self._record()
        self._listeners.moved([each for each in numbers if each in self._live and self._live[each].count_loss()])

    async def _watch_deadlines(self) -> None:
        """End requests that are late while the scheduler process cannot do it, and all after WITHOUT_LINK_S."""
        link = self.link
        while True:
            if link.up.is_set():
                with suppress(TimeoutError):
                    async with asyncio.timeout(OVERDUE_S):
                        await link.down.wait()
            else:
                await asyncio.sleep(WATCH_EVERY_S)
            now, linked = time.monotonic(), link.up.is_set()
            if not linked and now > link.lost_at + WITHOUT_LINK_S:
                self._end_all(Unhealthy(NO_ANSWER))
            latest = now - OVERDUE_S if linked else now
            for number, live in [each for each in self._live.items() if each[1].due <= latest]:
                self._record()
                self._listeners.failure(number, live.expired())
                self._cancel(number, satisfied=False)

    def _deliver(self, report: pb.Report) -> None:
        listeners, live = self._listeners, self._live
        if report.placements:
            self._record()
        for placed in report.placements:
            if (request := live.get(RequestId(placed.request))) is not None:
                request.generated_when_placed = len(request.generated)
                listeners.placed(RequestId(placed.request), placed.cached_tokens, placed.replica)
        if report.lost:
            self._lose(map(RequestId, report.lost))
        for each in report.prompt_logprobs:
            if (request := live.get(RequestId(each.request))) is not None and not request.scored:
                request.scored = True
                listeners.prompt_logprobs(RequestId(each.request), each.scored)
        predicted = report.predicted_tokens, report.accepted_predicted_tokens
        listeners.predicted(zip(map(RequestId, report.predicted_requests), *predicted, strict=True))
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
