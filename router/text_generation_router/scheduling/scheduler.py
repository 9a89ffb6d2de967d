"""Scheduler: one fair queue, several replicas.

Each replica runs this loop; clients submit and cancel beside it:

    expire()                            # end queued and running requests past their deadline
    dispatch():                         # what leaves the queue, and where it goes
        while a replica has room and sequence := queue.peek():
            if a better replica has room soon, or another sequence is computing its prefix:
                queue.skip(sequence)
            elif a replica with room has the KV blocks:     # the one with most cached prefix - pending work
                queue.remove(sequence); charge its tenant
            elif one of them could ever hold it:
                break                   # the order of the queue holds: the next ones wait, too
    output = schedule(replica):         # what its next step computes
        allocate KV blocks to sequences near the end of theirs
        if one is stalled without a block: preempt choose_victim(running)      # back to the head of the queue
        prefill = chunks of prompts, within the token budget
    deliveries = update(replica, step_output)           # new tokens, errors, freed slots and blocks

A sequence leaves the queue only when a replica has room for it now, so order, priorities and fairness hold until the last
moment. See `queue` for that order, `dispatch` for the choice of a replica, `replica_scheduler` for steps, `preemption`
for victims, and `add`, `open`, `lose`, `drain` and `remove` for replicas that come, join, fail, pause and go.

Pure: no clock, no socket, no log, no task, no randomness. The same calls give the same results.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from operator import attrgetter

from text_generation_proto.values import FailureCode
from text_generation_router.request import Request, RequestId, RequestProgress, TenantId
from text_generation_router.scheduling.capacity import Capacity, kv_usage, room_in_use
from text_generation_router.scheduling.charges import charge_first_start, count_hits
from text_generation_router.scheduling.dispatch import Dispatcher
from text_generation_router.scheduling.estimates import OutputLengths, Throughput, Throughputs
from text_generation_router.scheduling.host_cache import HostCaches
from text_generation_router.scheduling.lazy_heap import LazyHeap
from text_generation_router.scheduling.messages import Deliveries, Failed, ReplicaSpec, SchedulerOutput, StepOutput
from text_generation_router.scheduling.policy import Policy
from text_generation_router.scheduling.queue import FairQueue
from text_generation_router.scheduling.replays import Replays
from text_generation_router.scheduling.replica_scheduler import ReplicaScheduler
from text_generation_router.scheduling.sequence import ScheduledSequence, State

COUNTED = ("preemptions", "prompt_tokens", "hit_tokens")
"""Counts that each replica keeps."""


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Gauges and counters over all replicas. Counters never decrease. `metrics.scheduler` documents them."""

    waiting: int
    queued_tokens: int
    queue_seconds: float
    busy_ratio: float
    running: int
    promised_tokens: int
    kv_usage: float
    used_tokens: int
    cached_blocks: int
    num_blocks: int
    block_size: int
    num_replicas: int
    serving_replicas: int
    preemptions: int
    cancellations: int
    expirations: int
    moves: int
    prompt_tokens: int
    hit_tokens: int

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / max(1, self.prompt_tokens)


class Scheduler:
    """The queue, and the slots and KV blocks of all replicas."""

    def __init__(self, policy: Policy, replicas: int = 1, first_store: int = 0) -> None:
        """`first_store`: the number of its first store on a host; a store of a scheduler before, with another one, may end late."""
        self.policy = policy
        self.queue = FairQueue(policy.tenant_weights)
        self.replicas: dict[int, ReplicaScheduler | None] = {}
        """By number; None if it does not serve."""
        self.host_caches = HostCaches(first_store)
        self.capacity = Capacity()
        self.versions = Counter[str]()
        """The number of times that each LoRA adapter was loaded or unloaded; 0: it was there from the start."""
        self.draining: set[int] = set()
        self._dispatcher = Dispatcher(policy, self.queue, self.replicas, self.draining)
        self.replays = Replays(self.replicas, self.draining)
        self._sequences: dict[RequestId, ScheduledSequence] = {}
        self._deadlines: LazyHeap[ScheduledSequence] = LazyHeap(attrgetter("deadline"))
        self._lengths = OutputLengths()
        self._throughputs = Throughputs()
        self._numbers, self._arrivals = count(), count(1)
        self._lost = Counter[str]()
        """Counts of replicas that were lost since."""
        self._cancellations = self.expired = self._moves = 0
        for _ in range(replicas):
            self.add()

    def set_adapter(self, name: str, replicas: Collection[int]) -> None:
        """Note that these replicas hold a LoRA adapter, newly loaded, and no others do."""
        self.versions[name] += 1
        for number, spec in self.capacity.set_adapter(name, replicas).items():
            if (replica := self.replicas.get(number)) is not None:
                replica.spec = spec
        self._dispatcher.unskip_all()

    def submit(self, request: Request, now: float, progress: RequestProgress | None = None) -> Deliveries:
        """Queue a new request, which must fit, or with `progress` one that another scheduler had accepted; this may fail."""
        assert request.id not in self._sequences, "a request is submitted once"
        fits = self.capacity.fits(len(request.prompt), request.max_new_tokens, request.adapter)
        assert progress or fits, "a request must be able to run alone"
        expected = self._lengths.expected(request.max_new_tokens)
        sequence = ScheduledSequence(request, next(self._arrivals), now, expected, self.versions[request.adapter])
        if progress is not None:
            sequence.resume(progress)
        self._sequences[request.id] = sequence
        sequence.work = self._work(sequence)
        self._moves += sequence.resumed
        (self.queue.requeue if sequence.resumed else self.queue.put)(sequence)
        if sequence.deadline[0] < math.inf:
            self._deadlines.put(sequence)
        return self._fail_unfit([sequence]) if progress is not None and self.capacity.known else Deliveries()

    def cancel(self, request_id: RequestId, *, satisfied: bool = False) -> None:
        """Cancel a request: its client left, or a stop string was found (`satisfied`). No-op if unknown or finished."""
        if (sequence := self._sequences.get(request_id)) is None or sequence.state is State.CANCELLED:
            return
        self._cancellations += 1
        if satisfied:
            self._lengths.record(sequence.request.max_new_tokens, len(sequence.generated))
        self._drop(sequence)

    def _drop(self, sequence: ScheduledSequence) -> None:
        """End `sequence`. A slot that its replica knows of is free once the release was applied."""
        self._deadlines.discard(sequence)
        if sequence.state is not State.WAITING:
            replica = self.replicas[sequence.replica]
            assert replica is not None, "the sequences of a lost replica wait"
            replica.drop(sequence)
            self._dispatcher.changed(replica.replica)
            if sequence.slot >= 0:  # its replica knows of it
                return
            if not sequence.generated:  # nothing was computed
                self.queue.charge(sequence, -sequence.charged_tokens)
                sequence.charged_tokens = 0
        self._forget(sequence)

    def expire(self, now: float) -> Deliveries:
        """End the requests past their deadline."""
        deliveries = Deliveries()
        while (late := self._deadlines.first()) is not None and late.deadline[0] <= now:
            message = late.request.qos.late(len(late.generated), queued=late.is_new)
            deliveries.failed.append(Failed(late.id, FailureCode.EXPIRED, message))
            self._drop(late)
        self.expired += len(deliveries.failed)
        return deliveries

    @property
    def next_expiry(self) -> float | None:
        """The time of the next deadline; None if there is none."""
        due = math.inf if (sequence := self._deadlines.first()) is None else sequence.deadline[0]
        return None if due == math.inf else due

    def dispatch(self) -> list[int]:
        """Place queued sequences on replicas with room. Return the replicas that got some."""
        placed: dict[int, None] = {}
        for sequence, replica in self._dispatcher.place():
            self.queue.started(sequence)
            self.queue.remove(sequence)
            charge_first_start(sequence, replica, self.queue)
            placed[replica.replica] = None
        return list(placed)

    def schedule(self, replica: int, number: int | None = None) -> SchedulerOutput | None:
        """Return the changes for the next step boundary, with this number if given; None if there are none, or earlier ones pend."""
        if (scheduler := self.replicas[replica]) is None:
            return None
        self._dispatcher.changed(replica)
        return scheduler.schedule(number)

    def may_have_orders(self, replica: int) -> bool:
        """Return False if `schedule` would return None. Cheap."""
        return (scheduler := self.replicas[replica]) is not None and scheduler.may_have_orders

    def update(self, replica: int, output: StepOutput, now: float) -> Deliveries:
        deliveries, scheduler = Deliveries(), self.replicas[replica]
        assert scheduler is not None, "a lost replica makes no steps"
        measured = replica != self.replays.replica
        served, left = scheduler.update(output, deliveries, measured=measured)
        for request_id, _ in deliveries.cached:
            count_hits(self._sequences[request_id], scheduler, self.queue)
        if measured and output.step_s:
            share = 1.0 if output.prefilled else room_in_use(scheduler, self.policy)
            self._throughputs[replica].record(now, served, output.step_s, queued=len(self.queue) > 0, share=share)
        for sequence in self.replays.forget(left, deliveries):
            if sequence.state is State.WAITING:
                self._requeue(sequence)
                continue
            if sequence.state is State.FINISHED:
                self._lengths.record(sequence.request.max_new_tokens, len(sequence.generated))
            self._forget(sequence)
        self._move(scheduler, self._dispatcher.roles.leaving(scheduler, output))
        self._dispatcher.changed(replica)
        return deliveries

    def _requeue(self, sequence: ScheduledSequence) -> None:
        sequence.work = self._work(sequence)
        self.queue.requeue(sequence)
        self.queue.ended(sequence)

    def _forget(self, sequence: ScheduledSequence) -> None:
        """Forget a sequence that waits or left its replica. Its tenant pays for generated, not for expected tokens."""
        del self._sequences[sequence.id]
        self._deadlines.discard(sequence)
        if sequence.charged_tokens:
            self.queue.charge(sequence, len(sequence.generated) - sequence.expected_new_tokens)
        if sequence.state is State.WAITING:
            self.queue.remove(sequence)
        else:
            self.queue.ended(sequence)

    def add(self) -> int:
        """Return the number of a new replica, which does not serve yet. No number is used twice."""
        number = next(self._numbers)
        self.replicas[number] = None
        self.capacity.added(number)
        self._throughputs[number] = Throughput()
        self._dispatcher.added(number)
        return number

    def remove(self, replica: int) -> Deliveries:
        """Forget a replica that was lost or never served. Queued requests that no other replica can hold fail."""
        assert self.replicas[replica] is None, "a replica is lost before it is removed"
        del self.replicas[replica]
        self.draining.discard(replica)
        del self._throughputs[replica]
        self.host_caches.removed(replica)
        self._dispatcher.removed(replica)
        self.capacity.removed(replica)
        return self._fail_unfit(list(self.queue))

    def open(self, replica: int, spec: ReplicaSpec) -> Deliveries:
        """Let an empty replica serve. Queued requests that no replica can hold any more fail."""
        assert self.replicas[replica] is None, "a replica joins once"
        host = self.host_caches.of(replica, spec, [each.cache.host for each in self.serving])
        self.replicas[replica] = ReplicaScheduler(replica, spec, self.policy, host)
        self.capacity.joined(replica, spec)
        self.drain(replica, draining=False)
        return self._fail_unfit(list(self.queue))

    def _fail_unfit(self, queued: Sequence[ScheduledSequence]) -> Deliveries:
        """End those of `queued` that no replica can hold or continue, also none that is still to join."""
        deliveries = Deliveries()
        for sequence in queued:
            left = sequence.request.max_new_tokens - len(sequence.generated)
            problem = self._cannot_move(sequence)
            if problem is None and not self.capacity.may_fit(sequence.length, left, sequence.request.adapter):
                problem = "no replica can hold this request any more"
            if problem is not None:
                deliveries.failed.append(Failed(sequence.id, FailureCode.LOST, problem))
                self._forget(sequence)
        return deliveries

    def _cannot_move(self, sequence: ScheduledSequence) -> str | None:
        return sequence.cannot_move(self.policy.max_request_moves, self_scheduling=self.capacity.self_scheduling)

    def lose(self, replica: int) -> Deliveries:
        """Stop using a replica. Its sequences are requeued; those that cannot continue or lost too many replicas fail."""
        if (lost := self.replicas[replica]) is None:
            return Deliveries()
        self.replicas[replica] = None
        self._dispatcher.changed(replica)
        self._lost.update({name: getattr(lost, name) for name in COUNTED})
        deliveries = Deliveries()
        for sequence in self.replays.forget(lost.close(), deliveries):
            if sequence.state is State.CANCELLED:
                self._forget(sequence)
                continue
            if sequence.state is State.RUNNING:
                self._moves += 1
                sequence.count_move()
                deliveries.moved.append(sequence.id)
            if problem := self._cannot_move(sequence):
                sequence.leave_replica(State.FAILED)
                deliveries.failed.append(Failed(sequence.id, FailureCode.LOST, problem))
                self._forget(sequence)
            else:
                sequence.leave_replica(State.WAITING)
                self._requeue(sequence)
        return deliveries

    def drain(self, replica: int, *, draining: bool = True) -> None:
        """Give `replica` no new sequences, or give it some again."""
        (self.draining.add if draining else self.draining.discard)(replica)
        self._dispatcher.changed(replica)
        self._dispatcher.unskip_all()

    def evacuate(self, replica: int) -> None:
        """Move the running sequences of a draining replica to others of its host: their blocks are stored, and loaded there."""
        if (source := self.replicas[replica]) is not None:
            self._move(source, self._dispatcher.roles.movable(source))

    def _move(self, source: ReplicaScheduler, sequences: Iterable[ScheduledSequence]) -> None:
        for sequence in sequences:
            source.move(sequence)
            if sequence.state is State.WAITING:
                self._requeue(sequence)

    def _work(self, sequence: ScheduledSequence) -> int:
        """Return the expected cost in tokens: prompt tokens that no replica has cached, and new tokens."""
        return max(1, sequence.expected_length - self._dispatcher.cached_tokens(sequence))

    def estimated_wait(self, tenant: TenantId, *, for_permit: bool = False) -> float | None:
        """Return the seconds that a new request of `tenant` would wait (`Retry-After`); None if unknown.

        The work before it over the measured throughput: the work of the whole queue, or of its tenant over that tenant's
        share, whichever is less. `for_permit`: a sequence must end first, even if a replica has room.
        """
        serving, tenants = self.serving, self.queue.tenants
        if queued := self.queue.work:
            work = min(queued, tenants.work(tenant) / tenants.share(tenant))
        elif not for_permit and self._dispatcher.has_room(1):
            return 0.0
        else:  # the wait for one sequence to end
            work = sum(each.work for each in serving) / max(1, sum(each.occupied_slots for each in serving))
        return self._throughputs.wait(work, [replica.replica for replica in serving])

    def exceeds_queue_limit(self, request: Request) -> bool:
        """Return True if more tokens of work would wait than the policy allows."""
        limit = self.capacity.queue_limit(self.policy)
        work = len(request.prompt) + self._lengths.expected(request.max_new_tokens)
        return limit is not None and self.queue.exceeds(limit, work, request.qos.tenant)

    def request_in(self, replica: int, slot: int) -> RequestId | None:
        """Return the request in a slot; None if it is free or its request was cancelled."""
        return None if (scheduler := self.replicas[replica]) is None else scheduler.request_in(slot)

    @property
    def requests(self) -> Mapping[RequestId, ScheduledSequence]:
        """All requests that have not ended or left their slot, in order of arrival."""
        return self._sequences

    @property
    def serving(self) -> Sequence[ReplicaScheduler]:
        """The replicas that serve, draining ones included."""
        return [replica for replica in self.replicas.values() if replica is not None]

    @property
    def available(self) -> Sequence[ReplicaScheduler]:
        """The replicas that get new sequences."""
        return [replica for replica in self.serving if replica.replica not in self.draining]

    def stats(self, now: float = math.inf) -> SchedulerStats:
        """Return gauges and counters, in time proportional to the number of replicas. At infinity no replica is busy."""
        serving, available = self.serving, [replica.replica for replica in self.available]
        # Without a replica queue_seconds is the wait until one of those that were lost is back and has served the queue.
        return SchedulerStats(
            waiting=len(self.queue),
            queued_tokens=self.queue.work,
            queue_seconds=self._throughputs.wait(self.queue.work, available or self._throughputs.fastest()) or 0.0,
            busy_ratio=self._throughputs.busy_ratio(available, now),
            running=sum(replica.occupied_slots for replica in serving) - (self.replays.running is not None),
            promised_tokens=sum(replica.promised_tokens for replica in serving),
            kv_usage=kv_usage(replica.cache for replica in serving),
            used_tokens=sum(replica.cache.used * replica.spec.block_size for replica in serving),
            cached_blocks=sum(replica.cache.tree.cached_blocks for replica in serving),
            num_blocks=sum(replica.spec.num_blocks for replica in serving),
            block_size=self.capacity.block_size,
            num_replicas=len(self.replicas),
            serving_replicas=len(available),
            cancellations=self._cancellations,
            expirations=self.expired,
            moves=self._moves,
            **{name: self._lost[name] + sum(getattr(each, name) for each in serving) for name in COUNTED},
        )
