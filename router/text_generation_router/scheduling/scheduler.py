"""The Scheduler: one queue, several replicas. Who leaves the queue and where to; what each replica is to change; who has
expired; what a lost replica leaves behind; how long a newcomer would wait.

Pure: no clock, no socket, no log, no task, no randomness. Values in, values out; the same calls give the same orders.

    open(replica, spec), lose(replica)    replicas that come and go
    submit(request), cancel(id)           what clients want
    dispatch() -> replicas                queued entries go to replicas that have room; these have something to decide
    decide(replica) -> Orders | None      what is to change at the replica's next step boundary
    apply(replica, outcome) -> Deliveries what a step brought, and who is to hear of it
    expire() -> Deliveries                whose time is over

An entry leaves the queue only when a replica has room for it now, so the order of the queue, its classes and its
fairness hold until the last moment; see `queue` for that order, `dispatch` for the choice of a replica, and `batch` for
what happens there.

An entry whose beginning is being computed for another one is held back until it is there, rather than computing it
twice; those behind it may go before it.
"""

from __future__ import annotations

import math

from text_generation_proto.values import FailureCode
from text_generation_router.request import Request, RequestId, TenantId
from text_generation_router.scheduling.aside import Aside, Crowd, Leader
from text_generation_router.scheduling.batch import Batch
from text_generation_router.scheduling.dispatch import Dispatcher, Ranking
from text_generation_router.scheduling.entry import Entry, State
from text_generation_router.scheduling.foresight import Foresight
from text_generation_router.scheduling.lazy_heap import Key, LazyHeap
from text_generation_router.scheduling.policy import Policy
from text_generation_router.scheduling.prefix import WORTH_WAITING_FOR
from text_generation_router.scheduling.queue import FairQueue
from text_generation_router.scheduling.replicas import Replicas
from text_generation_router.scheduling.steps import Deliveries, Failed, Orders, Outcome, ReplicaSpec

MOST_HELD_BACK = 16
"""Entries that one `dispatch` sets aside: it is to take microseconds, and there will be another."""


def _end_by(entry: Entry) -> Key:
    end_by = entry.request.qos.end_by
    return math.inf if end_by is None else end_by, entry.arrival


MOST_MOVES = 100
"""Replicas that a request may lose in all."""


class Scheduler:
    """Owns the queue, and the slots and KV blocks of every replica."""

    def __init__(self, policy: Policy, replicas: int = 1) -> None:
        self._policy = policy
        self._queue: FairQueue[Entry] = FairQueue(policy.tenant_weights)
        self._replicas = Replicas(policy, replicas)
        self._entries: dict[RequestId, Entry] = {}
        self._aside = Aside(self._queue)
        self._dispatcher = Dispatcher(policy.dispatch, replicas)
        self._foresight = Foresight(replicas)
        self._ends: LazyHeap[Entry] = LazyHeap(_end_by)
        """Entries that expire wherever they are."""
        self._arrivals = 0
        self.cancellations = 0
        """Entries dropped before their own end, ever: nobody waited any more, or a stop string was found."""
        self.expirations = 0
        """Entries whose deadline passed, ever."""
        self.moves = 0
        """Times an entry lost its replica while it ran, ever."""
        self.prompt_tokens = 0
        """Tokens of the prompts that left the queue, ever; of requests that come back, not again."""
        self.hit_tokens = 0
        """Of those, how many were cached."""

    # --------------------------------------------------------------------------------------------------------- replicas

    def open(self, replica: int, spec: ReplicaSpec, now: float) -> Deliveries:
        """`replica` joins, with nothing in it. Waiting requests that no replica could ever hold now fail."""
        self._replicas.open(replica, spec)
        self._aside.house()
        deliveries = Deliveries()
        for entry in list(self._queue):
            if not self.fits(entry.length, entry.request.max_new_tokens - len(entry.generated)):
                self._queue.remove(entry)
                self._fail(entry, FailureCode.LOST, "the KV cache is too small for this request now", deliveries)
        return deliveries

    def lose(self, replica: int, now: float) -> Deliveries:
        """`replica` is gone, with all it held. What ran there waits again, unless that happened too often."""
        deliveries = Deliveries()
        if (batch := self._replicas.lose(replica)) is None:
            return deliveries
        ran, others = batch.clear()
        self._forget_cancelled(replica)
        self.moves += len(ran)
        for entry in ran:
            entry.moves += 1
            # Who gets on is not what kills shards; who never does may well be.
            entry.moves_in_vain = 1 if len(entry.generated) > entry.generated_before else entry.moves_in_vain + 1
        for entry in sorted((*ran, *others), key=lambda entry: entry.arrival):
            if (problem := self._cannot_move(entry, batch.spec)) is not None:
                self._queue.ended(entry.request.qos.tenant)
                self._fail(entry, FailureCode.LOST, problem, deliveries)
            else:
                self._requeue(entry)
        return deliveries

    def _cannot_move(self, entry: Entry, lost: ReplicaSpec) -> str | None:
        """Why `entry` cannot go on now that its replica is lost; None if it can."""
        if entry.moves_in_vain > self._policy.max_moves or entry.moves > MOST_MOVES:
            return "the shards that computed this request were lost"
        if lost.self_scheduling and entry.is_bound:
            return "lost its shard; a constrained answer cannot go on elsewhere"
        return None

    def drain(self, replica: int, *, draining: bool = True) -> None:
        """Give `replica` nothing new."""
        self._replicas.drain(replica, draining=draining)
        self._aside.house()

    # ------------------------------------------------------------------------------------------------ what clients want

    def fits(self, prompt_tokens: int, max_new_tokens: int) -> bool:
        """Whether such a request could run alone on some replica, be it one that is lost for now."""
        return self._replicas.fits(prompt_tokens, max_new_tokens)

    def submit(self, request: Request, now: float) -> None:
        """Queue `request`, which must fit."""
        assert request.id not in self._entries, "a request is submitted once"
        assert self.fits(len(request.prompt), request.max_new_tokens), "a request must be able to run alone"
        self._arrivals += 1
        entry = Entry(request, self._arrivals, now, self._foresight.lengths.expected(request.max_new_tokens))
        self._entries[request.id] = entry
        entry.work = self._work(entry)
        self._queue.put(entry)
        if request.qos.end_by is not None:
            self._ends.put(entry)

    def cancel(self, request_id: RequestId, *, satisfied: bool = False) -> None:
        """Nobody waits for this request any more, or its text is whole (`satisfied`). Idempotent; unknown and ended
        requests are no news."""
        entry = self._entries.get(request_id)
        if entry is None or entry.state is State.CANCELLED:
            return
        self.cancellations += 1
        if satisfied:
            self._foresight.lengths.ended(entry.request.max_new_tokens, len(entry.generated))
        self._take_out(entry)

    def _take_out(self, entry: Entry) -> None:
        """`entry` ends here; its place on a replica is free once that knows."""
        if entry.state is State.WAITING:
            self._queue.remove(entry)
            self._over(entry)
            return
        batch = self._replicas.batches[entry.replica]
        assert batch is not None, "what ran on a lost replica waits"
        never_sent = entry.state is State.PLACED
        batch.drop(entry)
        self._replicas.changed.add(batch.replica)
        if never_sent:
            if not entry.generated:  # nothing was computed for it
                self._queue.charge(entry.request.qos.tenant, -entry.charged)
                entry.charged = 0
            self._queue.ended(entry.request.qos.tenant)
            self._over(entry)

    # ------------------------------------------------------------------------------------------------------- decisions

    def dispatch(self, now: float) -> list[int]:
        """Give queued entries to replicas that have room; the replicas that got some, each once."""
        given: dict[int, None] = {}
        self._aside.recall()
        held_back = 0
        while (entry := self._queue.peek()) is not None:
            self._replicas.look_for_room(len(self._queue))
            if not self._replicas.roomy:
                break
            ranking = self._dispatcher.rank(entry, self._replicas.roomy, self._replicas.crowded)
            if (end_of := self._better_later(entry, ranking)) is not None:
                self._aside.wait_for(end_of)
                held_back += 1
                if held_back == MOST_HELD_BACK:
                    break
                continue
            batch = next((batch for batch in ranking.roomy if batch.place(entry)), None)
            if batch is None:
                if self._replicas.may_hold(entry):
                    break
                self._aside.wait_for_a_home()
                continue
            self._queue.pop()
            self._placed(entry, batch)
            given[batch.replica] = None
        return list(given)

    def decide(self, replica: int, now: float) -> Orders | None:
        """What is to change at the next step boundary; None while orders are on their way, or nothing is to change."""
        batch = self._replicas.batches[replica]
        if batch is None:
            return None
        self._replicas.changed.add(replica)
        return batch.decide()

    def wants_orders(self, replica: int) -> bool:
        """Whether `decide` may have something to say. False is certain, and costs nothing to find out."""
        batch = self._replicas.batches[replica]
        return batch is not None and batch.wants_orders

    def _better_later(self, entry: Entry, ranking: Ranking) -> Leader | Crowd | None:
        """What `entry` had better wait for: a replica that will soon have room, or another entry that computes there what
        it would otherwise compute once more."""
        if ranking.worth_waiting_for is not None:
            return Crowd(ranking.worth_waiting_for)
        if not self._policy.prefix_caching or entry.request.prompt_logprobs or self._policy.publish_prompts_only:
            return None
        batch = ranking.roomy[0]
        soon, leader = batch.being_computed(entry)
        if leader is None or soon - batch.cache.cached_tokens(entry) < WORTH_WAITING_FOR:
            return None
        return Leader(leader, batch.replica, soon)

    def _placed(self, entry: Entry, batch: Batch) -> None:
        self._dispatcher.chosen(entry, batch)
        self._replicas.changed.add(batch.replica)
        tenant = entry.request.qos.tenant
        self._queue.started(tenant)
        if not entry.charged:
            # What an engine that schedules for itself has cached is a guess: nobody is told of it, or charged by it.
            cached = 0 if batch.spec.self_scheduling else entry.cached_tokens
            self.prompt_tokens += len(entry.request.prompt)
            self.hit_tokens += cached
            entry.charged = len(entry.request.prompt) - cached + entry.expected
            self._queue.charge(tenant, entry.charged)

    # -------------------------------------------------------------------------------------------------------- outcomes

    def apply(self, replica: int, outcome: Outcome, now: float) -> Deliveries:
        """Record what a step brought."""
        deliveries = Deliveries()
        batch = self._replicas.batches[replica]
        assert batch is not None, "a lost replica makes no steps"
        applied = batch.apply(outcome, deliveries)
        if outcome.step_s:
            queued = len(self._queue) > 0
            self._foresight.served(replica, now, applied.served, outcome.step_s, queued=queued)
        for entry in applied.finished:
            self._foresight.lengths.ended(entry.request.max_new_tokens, len(entry.generated))
        for entry in (*applied.finished, *applied.dropped):
            self._queue.ended(entry.request.qos.tenant)
            self._over(entry)
        for entry in applied.returning:
            self._requeue(entry)
        self._replicas.changed.add(replica)
        return deliveries

    def expire(self, now: float) -> Deliveries:
        """End the requests whose time is over."""
        deliveries = Deliveries()
        for entry in self._queue.expire(now):
            self._fail(entry, FailureCode.EXPIRED, "its time in the queue was over", deliveries)
        while (late := self._ends.first()) is not None and _end_by(late)[0] <= now:
            self._ends.discard(late)
            if late.state is not State.CANCELLED:
                message = f"its time was over after {len(late.generated)} new tokens"
                deliveries.failed.append(Failed(late.request.id, FailureCode.EXPIRED, message))
                self._take_out(late)
        self.expirations += len(deliveries.failed)
        return deliveries

    @property
    def next_expiry(self) -> float | None:
        """When `expire` may have something to do next."""
        entry = self._ends.first()
        ends = (None if entry is None else _end_by(entry)[0], self._queue.next_expiry)
        return min((end for end in ends if end is not None), default=None)

    def _requeue(self, entry: Entry) -> None:
        """`entry` left its replica and waits again, before all others."""
        entry.work = self._work(entry)
        self._queue.put_back(entry)
        self._queue.ended(entry.request.qos.tenant)

    def _over(self, entry: Entry) -> None:
        """`entry` has ended and is forgotten; its tenant pays for what it took, not for what was expected."""
        del self._entries[entry.request.id]
        self._aside.forget(entry)
        self._ends.discard(entry)
        if entry.charged:
            self._queue.charge(entry.request.qos.tenant, len(entry.generated) - entry.expected)

    def _fail(self, entry: Entry, kind: FailureCode, message: str, deliveries: Deliveries) -> None:
        """`entry`, which is in no queue and on no replica, ends with an error."""
        deliveries.failed.append(Failed(entry.request.id, kind, message))
        self._over(entry)

    def _forget_cancelled(self, replica: int) -> None:
        for entry in [one for one in self._entries.values() if one.state is State.CANCELLED and one.replica == replica]:
            self._queue.ended(entry.request.qos.tenant)
            self._over(entry)

    # ------------------------------------------------------------------------------------------------------ foreseeing

    def _work(self, entry: Entry) -> int:
        """Tokens that `entry` will probably cost: prompt tokens that are cached nowhere, and new tokens."""
        cached = self._dispatcher.cached_tokens(entry, self._replicas.batches)
        return max(1, entry.length - cached + entry.expected - len(entry.generated))

    def foreseen_wait(self, tenant: TenantId, now: float) -> float | None:
        """Seconds that a request of `tenant` which came now would wait; None: nothing is known yet."""
        self._replicas.look_for_room(1)
        return self._foresight.wait(self._queue, tenant, self._replicas.serving, now, full=not self._replicas.roomy)

    def is_overfull(self, request: Request) -> bool:
        """Whether `request` is one too many: more work would wait than may."""
        return self._foresight.is_overfull(self._queue, self._policy.max_queued_tokens, request)

    # --------------------------------------------------------------------------------------------------------- figures

    def owner(self, replica: int, slot: int) -> RequestId | None:
        """Whose slot this is; None for nobody's, and for those whose client is gone."""
        batch = self._replicas.batches[replica]
        return None if batch is None else batch.owner(slot)

    @property
    def open_replicas(self) -> int:
        """Replicas there are now."""
        return len(self._replicas.serving)

    @property
    def replicas(self) -> int:
        """Replicas there may be."""
        return len(self._replicas.batches)

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    @property
    def queued_tokens(self) -> int:
        """The work in the queue."""
        return self._queue.work()

    @property
    def running(self) -> int:
        """Requests that run, those about to and those whose release is under way."""
        return sum(batch.held for batch in self._replicas.serving)

    @property
    def used_blocks(self) -> int:
        """KV blocks that requests hold."""
        return sum(batch.cache.in_use for batch in self._replicas.serving)

    @property
    def cached_blocks(self) -> int:
        """KV blocks in the prefix trees, whether somebody uses them or not."""
        return sum(batch.cache.tree.cached_blocks for batch in self._replicas.serving)

    @property
    def used_tokens(self) -> int:
        """Tokens that the KV blocks hold which requests hold."""
        return sum(batch.cache.in_use * batch.spec.block_size for batch in self._replicas.serving)

    @property
    def promised_tokens(self) -> int:
        """Tokens that the requests with a slot may come to have: prompts and all new tokens asked for."""
        return sum(batch.promised_tokens for batch in self._replicas.serving)

    @property
    def num_blocks(self) -> int:
        """KV blocks there are."""
        return sum(batch.spec.num_blocks for batch in self._replicas.serving)

    @property
    def block_size(self) -> int:
        """Tokens a KV block holds."""
        return self._replicas.block_size

    @property
    def preemptions(self) -> int:
        """Entries taken back to the queue, ever."""
        return self._replicas.preemptions

    @property
    def requests(self) -> tuple[RequestId, ...]:
        """Every request not ended, in order of arrival."""
        return tuple(self._entries)
