"""WorkerDelivery: hands the news of a report on to HTTP workers, in columns and without an object for each token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from text_generation_proto import convert
from text_generation_proto.v1 import shard_pb2
from text_generation_proto.worker_link import worker_link_pb2 as pb
from text_generation_router.errors import ServingError
from text_generation_router.request import RequestId
from text_generation_router.scheduling.messages import Deliveries
from text_generation_router.shards.convert import top_tokens_by_position
from text_generation_router.shards.listeners import Delivered, Delivery
from text_generation_router.worker_link.convert import refusal_to_pb


class ReportReceiver(Protocol):
    """Takes the reports for one worker."""

    def report(self, report: pb.Report) -> None: ...


class WorkerDelivery(Delivery[ReportReceiver]):
    """The workers of all live requests."""

    def of(self, receiver: ReportReceiver) -> list[RequestId]:
        """Return the live requests of a worker."""
        return [request_id for request_id, each in self._receivers.items() if each is receiver]

    def is_of(self, receiver: ReportReceiver, request_id: RequestId) -> bool:
        """Return True if this is a live request of the worker."""
        return self._receivers.get(request_id) is receiver

    def placed(self, request_id: RequestId, cached_tokens: int, replica: int) -> None:
        if receiver := self._receivers.get(request_id):
            placed = pb.Placement(request=request_id, cached_tokens=cached_tokens, replica=replica)
            receiver.report(pb.Report(placements=[placed]))

    def moved(self, request_ids: Iterable[RequestId]) -> None:
        reports = _Reports()
        for request_id in request_ids:
            if receiver := self._receivers.get(request_id):
                reports.of(receiver).lost.append(request_id)
        reports.send()

    def prompt_logprobs(self, request_id: RequestId | None, scored: shard_pb2.PromptLogprobs) -> None:
        if request_id is not None and (receiver := self._receivers.get(request_id)):
            receiver.report(pb.Report(prompt_logprobs=[pb.PromptLogprobs(request=request_id, scored=scored)]))

    def tokens(self, deliveries: Deliveries, token_ids: Sequence[int], report: shard_pb2.StepReport) -> None:
        reports = _Reports()
        receivers = self._receivers
        for request_id, cached in deliveries.cached:
            if receiver := receivers.get(request_id):
                to = reports.of(receiver)
                to.cached_requests.append(request_id)
                to.cached_tokens.append(cached)
        shares: dict[ReportReceiver, list[Delivered]] = {}
        for delivered in deliveries.tokens:
            receiver = receivers.get(delivered[0])
            if receiver is None:
                continue
            if receiver in shares:
                shares[receiver].append(delivered)
            else:
                shares[receiver] = [delivered]
            if delivered[3] is not None:
                del receivers[delivered[0]]
        if shares:
            columns = _Columns(token_ids, report)
            for receiver, share in shares.items():
                columns.write(share, reports.of(receiver))
        reports.send()

    def failure(self, request_id: RequestId, error: ServingError) -> None:
        if receiver := self._receivers.pop(request_id, None):
            receiver.report(pb.Report(failures=[pb.Failure(request=request_id, refusal=refusal_to_pb(error))]))


class _Reports:
    """The reports of one moment, by worker."""

    def __init__(self) -> None:
        self._reports: dict[ReportReceiver, pb.Report] = {}

    def of(self, receiver: ReportReceiver) -> pb.Report:
        """Return the report for a worker, to be filled."""
        if (report := self._reports.get(receiver)) is None:
            report = self._reports[receiver] = pb.Report()
        return report

    def send(self) -> None:
        """Hand them over."""
        for receiver, report in self._reports.items():
            receiver.report(report)


class _Columns:
    """The columns of a shard's report, of which each worker gets its share."""

    def __init__(self, token_ids: Sequence[int], report: shard_pb2.StepReport) -> None:
        self._token_ids = token_ids
        self._logprobs = list(report.logprobs)
        self._tops = dict(top_tokens_by_position(report))
        self._single = not report.token_counts
        """Each sequence has one token."""

    def write(self, share: Sequence[Delivered], to: pb.Report) -> None:
        """Write the columns of some sequences."""
        to.requests.extend([delivered[0] for delivered in share])
        if self._single:
            positions: Sequence[int] = [delivered[1] for delivered in share]
        else:
            positions = [at for _, start, end, _ in share for at in range(start, end)]
            to.token_counts.extend([end - start for _, start, end, _ in share])
        to.token_ids.extend([self._token_ids[at] for at in positions])
        if self._logprobs:
            to.logprobs.extend([self._logprobs[at] for at in positions])
        for index, delivered in enumerate(share):
            if (reason := delivered[3]) is not None:
                to.finished.append(index)
                to.reasons.append(convert.FINISH_REASONS_TO_PB[reason])
        if self._tops:
            for index, at in enumerate(positions):
                if (top := self._tops.get(at)) is not None:
                    to.top_tokens.append(pb.TopTokens(index=index, token_ids=top.token_ids, logprobs=top.logprobs))
