"""WorkerDelivery: hands the news of a report on to HTTP workers, in columns and without an object for each token."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from text_generation_proto import convert
from text_generation_proto.v1 import shard_pb2
from text_generation_proto.worker_link import worker_link_pb2 as pb
from text_generation_router.errors import ServingError
from text_generation_router.request import RequestId
from text_generation_router.scheduling.messages import Deliveries
from text_generation_router.shards.convert import top_tokens_by_position
from text_generation_router.shards.listeners import Delivered, Delivery
from text_generation_router.worker_link.convert import refusal_to_pb
from text_generation_router.worker_link.link import Link

WorkerLink = Link[pb.FromWorker]
"""The scheduler process's end of the link to a worker."""


class WorkerDelivery(Delivery[WorkerLink]):
    def of(self, link: WorkerLink) -> list[RequestId]:
        return [request_id for request_id, each in self._receivers.items() if each is link]

    def is_of(self, link: WorkerLink, request_id: RequestId) -> bool:
        return self._receivers.get(request_id) is link

    def placed(self, request_id: RequestId, cached_tokens: int, replica: int) -> None:
        if link := self._receivers.get(request_id):
            placed = pb.Placement(request=request_id, cached_tokens=cached_tokens, replica=replica)
            send_report(link, pb.Report(placements=[placed]))

    def moved(self, request_ids: Iterable[RequestId]) -> None:
        reports: defaultdict[WorkerLink, pb.Report] = defaultdict(pb.Report)
        for request_id in request_ids:
            if link := self._receivers.get(request_id):
                reports[link].lost.append(request_id)
        for link, news in reports.items():
            send_report(link, news)

    def prompt_logprobs(self, request_id: RequestId | None, scored: shard_pb2.PromptLogprobs) -> None:
        if request_id is not None and (link := self._receivers.get(request_id)):
            send_report(link, pb.Report(prompt_logprobs=[pb.PromptLogprobs(request=request_id, scored=scored)]))

    def predicted(self, columns: Iterable[tuple[RequestId | None, int, int]]) -> None:
        reports: defaultdict[WorkerLink, pb.Report] = defaultdict(pb.Report)
        for request_id, drafted, accepted in columns:
            if request_id is not None and (link := self._receivers.get(request_id)):
                reports[link].predicted_requests.append(request_id)
                reports[link].predicted_tokens.append(drafted)
                reports[link].accepted_predicted_tokens.append(accepted)
        for link, news in reports.items():
            send_report(link, news)

    def tokens(self, deliveries: Deliveries, token_ids: Sequence[int], report: shard_pb2.StepReport) -> None:
        reports: defaultdict[WorkerLink, pb.Report] = defaultdict(pb.Report)
        links = self._receivers
        for request_id, cached in deliveries.cached:
            if link := links.get(request_id):
                to = reports[link]
                to.cached_requests.append(request_id)
                to.cached_tokens.append(cached)
        logprobs = self._logprobs(deliveries, report)
        shares: defaultdict[WorkerLink, list[Delivered]] = defaultdict(list)
        for delivered in deliveries.tokens:
            link = links.get(delivered[0])
            if link is None:
                continue
            shares[link].append(delivered)
            if delivered[3] is not None:
                self._pop(delivered[0])
        if shares:
            columns = _Columns(token_ids, logprobs, report)
            for link, share in shares.items():
                columns.write(share, reports[link])
        for link, news in reports.items():
            send_report(link, news)

    def failure(self, request_id: RequestId, error: ServingError) -> None:
        if link := self._pop(request_id):
            send_report(link, pb.Report(failures=[pb.Failure(request=request_id, refusal=refusal_to_pb(error))]))


def send_report(link: WorkerLink, news: pb.Report) -> None:
    link.send(pb.FromScheduler(report=news))


class _Columns:
    """The columns of a shard's report, of which each worker gets its share."""

    def __init__(self, token_ids: Sequence[int], logprobs: Sequence[float], report: shard_pb2.StepReport) -> None:
        self._token_ids = token_ids
        self._logprobs = list(logprobs)
        self._tops = dict(top_tokens_by_position(report))
        self._single = not report.token_counts
        """Each sequence has one token."""

    def write(self, share: Sequence[Delivered], to: pb.Report) -> None:
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
