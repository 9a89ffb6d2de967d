"""Auditor: chooses requests, watches what they get and use, replays them while there is room, and reports what differs."""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from hashlib import blake2b
from typing import Any

from text_generation_common.log import log
from text_generation_proto.v1 import shard_pb2 as pb
from text_generation_router.audit.records import MAX_RECORDS, record_of, used, write_record
from text_generation_router.audit.served import MAX_TRIES, KeptRequests, Served
from text_generation_router.audit.verdict import Findings, Judgement, Scores, Verdict, bounds_of, judge
from text_generation_router.config import RouterConfig
from text_generation_router.request import Request, RequestId, RequestProgress
from text_generation_router.scheduling.messages import SchedulerOutput
from text_generation_router.scheduling.scheduler import Scheduler
from text_generation_router.shards.cluster import Cluster
from text_generation_router.shards.observer import StepObserver, StepRecord

RETRY_S = 0.05
"""Seconds between two looks for room while requests wait for their replay."""
SWEEP = 256
"""Watched requests beyond which those that ended otherwise are looked for."""


def is_chosen(request_id: RequestId, share: float) -> bool:
    """Return True for a `share` of all ids; always the same for one id."""
    digest = blake2b(request_id.to_bytes(8, "little"), digest_size=8, person=b"audit").digest()
    return int.from_bytes(digest, "little") < share * 2**64


class Auditor:
    """A StepObserver before that of the metrics, which learns nothing of replays, and the RequestWatcher of its cluster."""

    def __init__(
        self, scheduler: Scheduler, observer: StepObserver, config: RouterConfig, info: pb.InfoResponse
    ) -> None:
        self.cluster: Cluster[Any]
        """Set before the first request."""
        self.on_finding: Callable[[str, str, str], object] = lambda *_: None
        """Called with the kind, text and reason of an event for operators."""
        self.verdicts = Counter[str]()
        self.mismatches = Counter[str]()
        """Findings by the feature that they are likely due to."""
        self.kept = KeptRequests()
        self._scheduler = scheduler
        self._observer = observer
        self._config = config
        self._info = info
        self._bounds = bounds_of(info.engine, info.dtype, info.kv_cache_dtype)
        self._findings = Findings()
        self._records: deque[tuple[RequestId, bytes]] = deque()
        """Findings that are not written yet."""
        self._watched: dict[RequestId, Served] = {}
        """Requests that were chosen and run or wait."""
        self._satisfied: set[RequestId] = set()
        """Watched requests that have their whole text."""
        self._replays: dict[int, Served] = {}
        """Requests that are being replayed, by replica; also those that gave way, until their slot is free."""
        self._look = asyncio.Event()

    @property
    def waiting(self) -> int:
        """Requests that are watched, wait for their replay, or are being replayed."""
        self._sweep()
        return len(self._watched) + len(self.kept) + len(self._replays)

    # ------------------------------------------------------------------------------------------------ clients' requests

    def on_submit(self, request: Request, progress: RequestProgress | None) -> Request:
        """Choose a request, or not. Replays give way to each."""
        if self._replays:
            for number in self._scheduler.replays.cancel():
                self.cluster.wake(number)
            self._forget_replays()
        if not is_chosen(request.id, self._config.audit_share):
            return request
        if len(self._watched) > max(SWEEP, 2 * len(self._scheduler.requests)):
            self._sweep()
        self._watched[request.id] = served = Served(request)
        if progress is not None:
            served.tokens.extend(progress.generated)
            served.logprobs.extend([float("nan")] * len(progress.generated))
            served.moves = progress.moves.total
        if self._config.token_logprobs == "never":
            return request
        return replace(request, logprobs=replace(request.logprobs, tokens=True))

    def on_cancel(self, request_id: RequestId, *, satisfied: bool) -> None:
        """Stop watching a request; one that is `satisfied` has its whole text."""
        if not satisfied:
            self._watched.pop(request_id, None)
        elif request_id in self._watched:  # the report that brought its last tokens is observed next
            self._satisfied.add(request_id)

    def on_unloaded(self, adapter: str) -> None:
        """Replay no requests of an adapter any more: another one may get its name."""
        for served in [self.kept.take() for _ in range(len(self.kept))]:
            if served.request.adapter == adapter:
                self.verdicts[Verdict.DROPPED] += 1
            else:
                self._keep(served)

    def _keep(self, served: Served) -> None:
        if dropped := self.kept.put(served):
            self.verdicts[Verdict.DROPPED] += dropped

    def _sweep(self) -> None:
        """Forget watched requests that expired or failed beside the steps."""
        self._watched = {each: it for each, it in self._watched.items() if each in self._scheduler.requests}

    # ------------------------------------------------------------------------------------------------------- observing

    def on_orders(self, orders: SchedulerOutput, seconds: float) -> None:
        if self._watched or self._replays:
            for placement in orders.placements:
                if placement.request.replayed:
                    for replayed in self._replays.values():
                        if replayed.replay_id == placement.request.id:
                            replayed.slot = placement.slot
                elif (served := self._watched.get(placement.request.id)) is not None:
                    replica = self._scheduler.requests[placement.request.id].replica
                    served.placed(replica, placement.slot, placement.cached_tokens)
            if any(placement.request.replayed for placement in orders.placements):
                clients = tuple(each for each in orders.placements if not each.request.replayed)
                orders = replace(orders, placements=clients, join_reason=orders.join_reason if clients else None)
        self._observer.on_orders(orders, seconds)

    def on_report(self, record: StepRecord) -> None:
        if self._watched:
            self._watch(record)
        if (replayed := self._replays.get(record.replica)) is not None:
            record = self._take_replay(record, replayed)
        self._observer.on_report(record)

    def on_loss(self, replica: int) -> None:
        for served in self._watched.values():
            if served.replica == replica:
                served.lost()
        self._look.set()  # the scheduler learns of it next
        self._observer.on_loss(replica)

    def _watch(self, record: StepRecord) -> None:
        """Record what the watched requests got in a step."""
        watched, report = self._watched, record.report
        if report.prefilled_slots:
            for served in watched.values():
                if served.replica == record.replica and served.slot in report.prefilled_slots:
                    served.chunks += 1
        drafted = {slot for drafting in report.drafting for slot in drafting.slots}
        for served in watched.values() if drafted else ():
            served.drafts += served.replica == record.replica and served.slot in drafted
        rows = len(record.deliveries.tokens) - len(report.generated_scores)
        for request_id, start, end, reason in record.deliveries.tokens:
            if (got := watched.get(request_id)) is not None:
                got.got(report, start, end, rows)
                if reason is not None:
                    self._satisfied.add(request_id)
        for request_id in self._satisfied:
            if (ended := watched.pop(request_id, None)) is not None and ended.tokens:
                ended.ended()
                self._keep(ended)
                self._look.set()
        self._satisfied.clear()
        for failed in record.deliveries.failed:
            watched.pop(failed.request_id, None)

    # --------------------------------------------------------------------------------------------------------- replays

    async def run(self) -> None:
        """Replay requests while there is room, until cancelled."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(RETRY_S if len(self.kept) else None):
                    await self._look.wait()
            self._look.clear()
            self._forget_replays()
            while self._records:
                await write_record(self._config.audit_folder, *self._records.popleft())
            while self._start():
                pass

    def _start(self) -> bool:
        """Start the next replay if there is room."""
        cluster, scheduler = self.cluster, self._scheduler
        if not len(self.kept) or len(scheduler.queue) or not scheduler.serving:
            return False
        if cluster.draining or cluster.stopping:
            return False
        if scheduler.stats(time.monotonic()).busy_ratio > self._config.audit_busy:
            return False
        served = self.kept.take()
        most = min(self._info.max_sequence_length, max(each.spec.num_tokens for each in scheduler.serving))
        request = served.replay(most)
        if request.replayed < 1:
            self.verdicts[Verdict.UNJUDGED] += 1
            return True
        number = scheduler.replays.start(request, served.replica)
        if number is None:
            self._keep(served)
            return False
        self._replays[number] = served
        cluster.wake(number)
        return True

    def _forget_replays(self) -> None:
        """Forget the replays whose slot is free. Those without a verdict are tried again."""
        for number, served in list(self._replays.items()):
            if served.replay_id in self._scheduler.replays:
                continue
            del self._replays[number]
            self._look.set()
            served.tries += 1
            if served.tries >= MAX_TRIES:
                self.verdicts[Verdict.DROPPED] += 1
            else:
                self._keep(served)

    def _take_replay(self, record: StepRecord, served: Served) -> StepRecord:
        """Take the results of a replay out of a record."""
        report = record.report
        failed = any(each.request_id == served.replay_id for each in record.deliveries.failed)
        if failed or report.generated_scores:
            del self._replays[record.replica]
            self._look.set()
            if failed:
                self.verdicts[Verdict.FAILED] += 1
            else:
                self._judge(served, report.generated_scores[0])
        self._forget_replays()
        return _without(record, served)

    def _judge(self, served: Served, message: pb.TokenScores) -> None:
        features = served.features
        scores = Scores(message.logprobs, message.drawn_ids, message.drawn_logprobs)
        judgement = judge(served.tokens, served.logprobs, scores, served.request.sampling, self._bounds)
        self.verdicts[judgement.verdict] += 1
        if judgement.verdict is Verdict.SAME:
            self._findings.confirm(features)
        elif judgement.verdict is Verdict.DIFFERENT:
            suspect = self._findings.add(features)
            self.mismatches[suspect] += 1
            self._report(served, judgement, suspect)
            if self._config.audit_folder and self._findings.total <= MAX_RECORDS:
                record = record_of(served, judgement, scores, self._info, suspect)
                self._records.append((served.request.id, record))
            if self._config.audit_action == "isolate" and (shared := self._findings.shared) is not None:
                self._isolate(shared)

    def _report(self, served: Served, judgement: Judgement, suspect: str) -> None:
        text = f"An audit of request {served.request.id} found another text; likely cause: {suspect}"
        found = {"request_id": served.request.id, "suspect": suspect} | asdict(judgement) | used(served)
        log.error("audit found another text", **found)
        self.on_finding("audit", text, f"token {judgement.position} of {len(served.tokens)}: {used(served)}")

    def _isolate(self, feature: str) -> None:
        """Do without what the last findings have in common, where the router can, until it restarts."""
        cluster, scheduler = self.cluster, self._scheduler
        if feature in cluster.isolated:
            return
        if feature == "prefix":
            scheduler.policy = replace(scheduler.policy, prefix_caching=False)
            for replica in scheduler.serving:
                replica.reuses_prefixes = False
                replica.cache.caching = False
            done = "no prefix is reused any more"
        elif feature.startswith("replica ") and cluster.release_replica(int(feature.removeprefix("replica "))):
            done = f"{feature} gets no requests any more"
        else:
            return
        cluster.isolated.append(feature)
        log.error("isolated after audits", feature=feature, action=done)
        self.on_finding("isolated", f"After audits: {done}", "")


def _without(record: StepRecord, replayed: Served) -> StepRecord:
    """Return a record as it were without the replay."""
    deliveries = record.deliveries
    deliveries.tokens = [each for each in deliveries.tokens if each[0] != replayed.replay_id]
    report = pb.StepReport()
    report.CopyFrom(record.report)
    columns = zip(record.report.prefilled_slots, record.report.prefilled_tokens, strict=True)
    prefilled = [each for each in columns if each[0] != replayed.slot]
    report.prefilled_slots[:] = [slot for slot, _ in prefilled]
    report.prefilled_tokens[:] = [tokens for _, tokens in prefilled]
    others = bool(prefilled or deliveries.tokens or record.report.failed)
    return record._replace(report=report, steps=record.steps if others else 0)
