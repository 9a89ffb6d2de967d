"""Auditor: chooses requests, watches what they get and use, replays them while there is room, and reports what differs."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from hashlib import blake2b
from typing import Any

from text_generation_common.log import log
from text_generation_proto.v1 import shard_pb2 as pb
from text_generation_router.audit.records import MAX_RECORDS, make_folder, record_of, write_record
from text_generation_router.audit.served import MAX_TRIES, OPTIONAL, KeptRequests, Served
from text_generation_router.audit.verdict import Bounds, Findings, Judgement, Verdict, judge
from text_generation_router.config import RouterConfig
from text_generation_router.request import Request, RequestId
from text_generation_router.scheduling.messages import SchedulerOutput
from text_generation_router.scheduling.scheduler import Scheduler
from text_generation_router.shards.cluster import Cluster
from text_generation_router.shards.observer import StepObserver, StepRecord

LOOK_S = 0.05
"""Seconds between two looks for requests that have ended, and for room for a replay. After a replay the next starts at once."""
MEASURED = 64  # tokens of the prompt, and of the answer, that measure the bounds


def is_chosen(request_id: RequestId, share: float) -> bool:
    """Return True for a `share` of all ids; always the same for one id."""
    digest = blake2b(request_id.to_bytes(8, "little"), digest_size=8, person=b"audit").digest()
    return int.from_bytes(digest, "little") < share * 2**64


@dataclass(slots=True, eq=False)
class Auditor:
    """A StepObserver before that of the metrics. Raises CannotServe if it cannot write records."""

    scheduler: Scheduler
    observer: StepObserver
    config: RouterConfig
    info: pb.InfoResponse
    share: float
    cluster: Cluster[Any] = field(init=False)
    """Set before the first request."""
    on_finding: Callable[[str, str, str], object] = lambda *_: None
    """Called with the kind, text and reason of an event for operators."""
    verdicts: Counter[str] = field(default_factory=Counter)
    mismatches: Counter[str] = field(default_factory=Counter)
    """Findings by the feature that they are likely due to."""
    _bounds: Bounds = field(init=False)
    _measured: RequestId | None = None
    """The request whose text measures them."""
    _findings: Findings = field(default_factory=Findings)
    _watched: dict[RequestId, Served] = field(default_factory=dict)
    """Requests that were chosen and run or wait."""
    _kept: KeptRequests = field(default_factory=KeptRequests)
    _replayed: Served | None = None
    """The request that is being replayed; also one that gave way, until its slot is free."""

    def __post_init__(self) -> None:
        if self.config.audit_folder:
            make_folder(self.config.audit_folder)

    @property
    def waiting(self) -> int:
        """Requests that are watched, wait for their replay, or are being replayed."""
        return len(self._watched) + len(self._kept) + (self._replayed is not None)

    def on_submit(self, request: Request) -> Request:
        """Choose a request, or not. A replay gives way to each, and each does without what is isolated."""
        if (replica := self.scheduler.replays.cancel()) is not None:
            self.cluster.wake(replica)
            self._end_replay()
        if self.cluster.isolated:
            request = replace(request, without=OPTIONAL.intersection(self.cluster.isolated))
        return self._watch(request) if is_chosen(request.id, self.share) else request

    def _watch(self, request: Request) -> Request:
        self._watched[request.id] = Served(replace(request, prediction=()))
        tokens = request.logprobs.tokens or self.config.token_logprobs != "never"
        return replace(request, logprobs=replace(request.logprobs, tokens=tokens))

    def on_orders(self, orders: SchedulerOutput, seconds: float) -> None:
        for placement in orders.placements if self._watched else ():
            if (served := self._watched.get(placement.request.id)) is not None:
                served.placed(self.scheduler.requests[placement.request.id])
        self.observer.on_orders(orders, seconds)

    def on_report(self, step: StepRecord) -> None:
        if self._watched:
            self._update_watched(step)
        if self._replayed is not None:
            self._end_replay(step)
            self._start()
        self.observer.on_report(step)

    def on_loss(self, replica: int) -> None:
        self.observer.on_loss(replica)

    def _update_watched(self, step: StepRecord) -> None:
        """Add to the watched requests what they got and used in a step."""
        report, tokens, live = step.report, step.deliveries.tokens, self.scheduler.requests
        if here := {number: each for number, each in self._watched.items() if each.replica == step.replica}:
            drafted = {slot for drafting in report.drafting for slot in drafting.slots}
            given = {request_id: (start, end) for request_id, start, end, _ in tokens if request_id in here}
            for number, served in here.items():
                # Another sequence may be in the slot of one that ended before this report, or waits again.
                if number in given or (number in live and live[number].slot == served.slot):
                    served.counts["chunks"] += served.slot in report.prefilled_slots
                    served.counts["drafts"] += served.slot in drafted
            for number, (start, end) in given.items():
                here[number].got(report, start, end, len(tokens))
        for failed in step.deliveries.failed:
            self._watched.pop(failed.request_id, None)

    async def run(self) -> None:
        """Replay requests while there is room, until cancelled."""
        await self.cluster.opened()
        self._measure()
        while True:
            await asyncio.sleep(LOOK_S)
            for request_id in [each for each in self._watched if each not in self.scheduler.requests]:
                if (ended := self._watched.pop(request_id)).tokens:
                    self.verdicts.update([Verdict.DROPPED] * self._kept.put(ended))
            self._end_replay()
            self._start()

    def _measure(self) -> None:
        """Choose the bounds. Where numbers are rounded, serve a text whose replay tells how far prefill and decode lie apart."""
        scheduler, prompt = self.scheduler, [7919 * at % self.info.vocab_size for at in range(1, 1 + MEASURED)]
        self._bounds = Bounds.of(self.info, has_states=any(each.cache.states for each in scheduler.serving))
        if self._bounds.rounded and scheduler.capacity.fits(MEASURED, MEASURED):
            request = Request(next(self.cluster.ids), prompt, MEASURED, ignore_eos=True)
            self._measured = request.id
            scheduler.submit(self._watch(request), time.monotonic())
            self.cluster.dispatch()

    def _start(self) -> None:
        """Start the next replay if there is room."""
        cluster, scheduler = self.cluster, self.scheduler
        if self._replayed is not None or not len(self._kept) or not scheduler.serving or len(scheduler.queue):
            return
        is_busy = scheduler.stats(time.monotonic()).busy_ratio > self.config.audit_busy
        if is_busy or cluster.draining or cluster.stopping:
            return
        served = self._kept.take()
        most = min(self.info.max_sequence_length, max(each.spec.num_tokens for each in scheduler.serving))
        request = served.replay(most)
        if request.replayed < 1 or not self._is_current(served):
            self.verdicts[Verdict.UNJUDGED] += 1
        elif (replica := scheduler.replays.start(request, served.replica)) is None:
            self._kept.put(served)
        else:
            self._replayed = served
            cluster.wake(replica)

    def _is_current(self, served: Served) -> bool:
        """Return True if the adapter of a request is the one that it was served with."""
        return self.scheduler.versions[served.request.adapter] == served.version

    def _end_replay(self, step: StepRecord | None = None) -> None:
        """Handle the end of a replay that has left its slot: the report has its scores or its failure, else it gave way."""
        served = self._replayed
        if served is None or self.scheduler.replays.running is not None:
            return
        self._replayed = None
        served.tries += 1
        if step is not None and step.report.generated_scores:
            self._judge(served, step.report.generated_scores[0])
        elif step is not None and any(each.request_id == -served.request.id for each in step.deliveries.failed):
            self.verdicts[Verdict.FAILED if self._is_current(served) else Verdict.UNJUDGED] += 1
        else:
            dropped = self._kept.put(served) if served.tries < MAX_TRIES else 1
            self.verdicts.update([Verdict.DROPPED] * dropped)

    def _judge(self, served: Served, scores: pb.TokenScores) -> None:
        if served.request.id == self._measured:
            info, self._bounds = self.info, Bounds.measured(served.logprobs, scores.logprobs)
            log.info("bound of audits measured", engine=info.engine, dtype=info.dtype, nats=self._bounds.token)
            return
        judgement = judge(served.tokens, served.logprobs, scores, served.request.sampling, self._bounds)
        self.verdicts[judgement.verdict] += 1
        if judgement.verdict is Verdict.SAME:
            self._findings.confirm(served.features)
        elif judgement.verdict is Verdict.DIFFERENT:
            self._add_finding(served, scores, judgement)

    def _add_finding(self, served: Served, scores: pb.TokenScores, judgement: Judgement) -> None:
        """Log, count and write a finding, and isolate what the last ones share."""
        number, config = served.request.id, self.config
        suspect = self._findings.add(served.features)
        self.mismatches[suspect] += 1
        replica, used, found = served.replica, served.used, asdict(judgement)
        log.error("audit found another text", request_id=number, suspect=suspect, replica=replica, used=used, **found)
        text = f"An audit of request {number} found another text; likely cause: {suspect}"
        told = ", ".join(f"{name} {amount}" for name, amount in {"replica": replica, **used}.items())
        self.on_finding("audit", text, f"token {judgement.position} of {len(served.tokens)}: {told}")
        if config.audit_folder and self._findings.total <= MAX_RECORDS:
            record = record_of(served, judgement, scores, self.info, suspect)
            asyncio.get_running_loop().run_in_executor(None, write_record, config.audit_folder, number, record)
        if config.audit_action == "isolate" and (shared := self._findings.shared) is not None:
            self._isolate(shared)

    def _isolate(self, feature: str) -> None:
        """Do without what the last findings have in common, where the router can, until it restarts."""
        cluster = self.cluster
        if feature in cluster.isolated:
            return
        done = f"requests do without {feature}"
        if feature.startswith("replica ") and cluster.release_replica(int(feature.removeprefix("replica "))):
            done = f"{feature} gets no requests any more"
        elif feature not in OPTIONAL:
            return
        cluster.isolated.append(feature)
        log.error("isolated after audits", feature=feature, action=done)
        self.on_finding("isolated", f"After audits: {done}", "")
