"""World: time, clients, the wire and replicas around the real scheduler, as discrete events.

What happens, in order of time: requests arrive, clients leave, spans of steps end, orders are decided and reach a
replica, deadlines pass, replicas are lost and come back. A replica free-runs as in life: its next step begins at once,
and orders decided meanwhile take effect at the first boundary after they arrive.

A span of many steps is one event. It is cut at the next boundary when something comes up for its replica. In life each of
its steps would have been reported by then; here they are where that may change a decision, which is when orders are
still to be acknowledged. Otherwise all that the scheduler does not know is that some texts are a few tokens longer.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from time import perf_counter

from text_generation_bench.simulator.arrivals import NOBODY, Arrival, Trace
from text_generation_bench.simulator.checks import KvAudit, check_orders
from text_generation_bench.simulator.fairness import Fairness
from text_generation_bench.simulator.ideal import IdealCache
from text_generation_bench.simulator.ledger import Ledger, Record
from text_generation_bench.simulator.replica import Replica
from text_generation_bench.simulator.setup import Setup
from text_generation_bench.simulator.shard import BrokenRule, SimulatedShard
from text_generation_bench.simulator.timings import Timings
from text_generation_router.request import Priority, QualityOfService, Request, RequestId
from text_generation_router.scheduling.scheduler import Scheduler
from text_generation_router.scheduling.steps import Deliveries, Outcome, ReplicaSpec

HOLD_SHARE = 0.5
"""Share of a step for which orders are held back, so that newcomers share a boundary: as `shards.pace` does."""
SHORTEST_HELD_S = 0.004
"""Steps shorter than this are not worth waiting in."""
IDEAL_PREFIXES = 1_000_000
"""Prefixes that are remembered to work out the ideal hit rate; with more of them there is none."""
LONGEST_REST_S = 86_400.0
"""Seconds after the last arrival in which all must have ended."""
NO_SERVICE = QualityOfService()


class World:
    """One run. Raises BrokenRule when the scheduler breaks a rule."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._machine = setup.machine
        machine = setup.machine
        self._spec = ReplicaSpec(machine.slots, machine.kv_tokens // machine.block_size, machine.block_size)
        self.scheduler = Scheduler(setup.policy, setup.replicas)
        self.ledger = Ledger(setup.targets)
        self.timings = Timings()
        self.ideal = IdealCache(machine.block_size, IDEAL_PREFIXES)
        self.fairness = Fairness() if setup.with_fairness else None
        self.reuses = setup.policy.prefix_caching
        """Whether prefixes are reused."""
        self.events = 0
        """Things that happened."""
        self.now = 0.0
        """Seconds since the simulation began."""
        self._heap: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._pushed = 0
        self._requests = 0
        self._expiry_at = math.inf
        self._next_tick = 1.0
        # Foreseeing costs time in proportion to the replicas, so of many requests only some are asked for.
        self._foresee_every = max(1, setup.replicas // 4)
        self._replicas = [self._new_replica(index) for index in range(setup.replicas)]

    def _new_replica(self, index: int) -> Replica:
        shard = SimulatedShard(self._machine, self._spec.num_slots, self._setup.ids)
        audit = KvAudit(self._machine, self._spec.num_blocks, self._setup.ids) if self._setup.audited else None
        return Replica(index, shard, audit)

    # ------------------------------------------------------------------------------------------------------------ time

    def run(self, trace: Trace) -> None:
        """Play `trace`, and go on until the last request has ended."""
        for replica in self._replicas:
            self._open(replica)
        for outage in self._setup.outages:
            self._push(outage.at, self._lose, self._replicas[outage.replica], outage.seconds)
        heap, fairness, latest = self._heap, self.fairness, self._setup.until + LONGEST_REST_S
        arrival = next(trace, None)
        while arrival is not None or heap:
            self.events += 1
            if self.now > latest:
                raise BrokenRule(f"{len(self.ledger.live)} requests go on and on")
            if arrival is not None and (not heap or arrival.at <= heap[0][0]):
                self.now = arrival.at
                if fairness is not None:
                    self._tick(fairness)
                self._arrive(arrival)
                arrival = next(trace, None)
            else:
                self.now, _, handler, arguments = heapq.heappop(heap)
                if fairness is not None:
                    self._tick(fairness)
                handler(*arguments)
        self._check_the_end()

    def _push(self, at: float, handler: Callable[..., None], *arguments: object) -> None:
        self._pushed += 1
        heapq.heappush(self._heap, (at, self._pushed, handler, arguments))

    def _tick(self, fairness: Fairness) -> None:
        while self.now >= self._next_tick:
            self._next_tick += 1.0
            fairness.tick(self.ledger.waiting)

    def _check_the_end(self) -> None:
        scheduler = self.scheduler
        if self.ledger.live:
            raise BrokenRule(f"{len(self.ledger.live)} requests never ended")
        if scheduler.requests or scheduler.waiting or scheduler.queued_tokens:
            raise BrokenRule(f"{len(scheduler.requests)} requests are still in the scheduler at the end")
        if scheduler.running or scheduler.used_blocks:
            raise BrokenRule(f"{scheduler.running} slots and {scheduler.used_blocks} blocks are still held at the end")

    # --------------------------------------------------------------------------------------------------------- clients

    def _arrive(self, arrival: Arrival) -> None:
        now, ledger, scheduler = self.now, self.ledger, self.scheduler
        request_id = RequestId(self._requests)
        self._requests += 1
        request = Request(request_id, arrival.prompt, arrival.max_new_tokens, qos=self._service(arrival))
        if not scheduler.fits(len(request.prompt), request.max_new_tokens) or scheduler.is_overfull(request):
            ledger.refuse(arrival, now)
            return
        foreseen = None
        if request_id % self._foresee_every == 0:
            foreseen = scheduler.foreseen_wait(request.qos.tenant, now)
        ledger.arrive(request_id, arrival, now, foreseen)
        self.ideal.arrive(arrival.prompt)
        since = perf_counter()
        scheduler.submit(request, now)
        self.timings.submit.add(since)
        if request.qos is not NO_SERVICE:
            self._watch_expiry()
        leaves = arrival.leaves_after_s
        if self._setup.blind and arrival.total_s is not None:
            # What the scheduler is not told, the client sees to itself.
            leaves = arrival.total_s if leaves is None else min(leaves, arrival.total_s)
        if leaves is not None:
            self._push(now + leaves, self._leave, request_id)
        self._dispatch()

    def _service(self, arrival: Arrival) -> QualityOfService:
        untold = arrival.queue_s is None and arrival.total_s is None and arrival.priority is Priority.DEFAULT
        if self._setup.blind or (untold and arrival.tenant == NOBODY):
            return NO_SERVICE
        queue_by = None if arrival.queue_s is None else arrival.at + arrival.queue_s
        end_by = None if arrival.total_s is None else arrival.at + arrival.total_s
        return QualityOfService(arrival.tenant, arrival.priority, queue_by=queue_by, end_by=end_by)

    def _leave(self, request_id: RequestId) -> None:
        if request_id in self.ledger.live:
            self.scheduler.cancel(request_id)
            self._ended(request_id, self.ledger.leave(request_id))

    def _watch_expiry(self) -> None:
        at = self.scheduler.next_expiry
        if at is not None and at < self._expiry_at:
            self._expiry_at = at
            self._push(at, self._expire)

    def _expire(self) -> None:
        self._expiry_at = math.inf
        self._fail(self.scheduler.expire(self.now))
        self._watch_expiry()
        self._dispatch()

    def _fail(self, deliveries: Deliveries) -> None:
        for failed in deliveries.failed:
            self._ended(failed.request_id, self.ledger.fail(failed.request_id, failed.kind))

    def _ended(self, request_id: RequestId, record: Record) -> None:
        """A request ended from outside: its replica, if it had one, is to hear of it."""
        if record.replica >= 0:
            self._wake(self._replicas[record.replica])
        self._dispatch()

    # ------------------------------------------------------------------------------------------------------- decisions

    def _dispatch(self) -> None:
        if not self.scheduler.waiting:
            return
        since = perf_counter()
        given = self.scheduler.dispatch(self.now)
        self.timings.dispatch.add(since)
        for index in given:
            self._wake(self._replicas[index])

    def _wake(self, replica: Replica) -> None:
        """There may be something to decide."""
        if replica.deciding or replica.orders is not None or not self.scheduler.wants_orders(replica.index):
            return
        span, step = replica.shard.span, min(replica.step_seconds)
        if span is not None and step >= SHORTEST_HELD_S:
            began = span.start + span.seconds(span.steps_until(self.now))
            if (at := began + HOLD_SHARE * step) > self.now:
                replica.deciding = True
                replica.holds += 1
                self._push(at, self._held_long_enough, replica, replica.session, replica.holds)
                return
        self._decide(replica)

    def _held_long_enough(self, replica: Replica, session: int, hold: int) -> None:
        if session == replica.session and hold == replica.holds and replica.deciding:
            self._decide(replica)

    def _decide(self, replica: Replica) -> None:
        replica.deciding = False
        shard, now = replica.shard, self.now
        if replica.acknowledged < shard.orders_applied:
            self._catch_up(replica)
        since = perf_counter()
        orders = self.scheduler.decide(replica.index, now)
        self.timings.decide.add(since)
        if orders is None:
            if shard.span is not None and self.scheduler.wants_orders(replica.index):
                self._cut(replica, now)
            return
        check_orders(orders, self._setup.policy)
        replica.arrivals = {one.request.id: self._arrival(one.request.id) for one in orders.admit}
        self.ledger.order(replica.index, orders, now)
        replica.orders = orders
        replica.orders_at = now + self._machine.orders_delay_s
        if shard.span is not None:
            self._cut(replica, replica.orders_at)
        elif not replica.at_boundary:
            self._push(replica.orders_at, self._take_orders, replica, replica.session)

    def _arrival(self, request_id: RequestId) -> Arrival:
        if (record := self.ledger.live.get(request_id)) is None:
            raise BrokenRule(f"request {request_id} was admitted after its end")
        return record.arrival

    # -------------------------------------------------------------------------------------------------------- replicas

    def _cut(self, replica: Replica, after: float) -> None:
        """The span ends at the first boundary that is not before `after`."""
        span = replica.shard.span
        assert span is not None, "only a span that began can be cut"
        span.steps = span.steps_to_boundary(after)
        if not replica.at_boundary:
            self._await_end(replica)

    def _await_end(self, replica: Replica) -> None:
        span = replica.shard.span
        assert span is not None, "only a span that began can end"
        if span.end != replica.end_at:
            replica.version += 1
            replica.end_at = span.end
            self._push(span.end, self._end_span, replica, replica.session, replica.version)

    def _end_span(self, replica: Replica, session: int, version: int) -> None:
        span = replica.shard.span
        if session != replica.session or version != replica.version or span is None:
            return
        replica.at_boundary = True
        self._record(replica, span.steps)
        self._begin(replica)

    def _take_orders(self, replica: Replica, session: int) -> None:
        if session == replica.session:
            replica.at_boundary = True
            self._begin(replica)

    def _begin(self, replica: Replica) -> None:
        """A boundary: orders that are there apply, and the next span begins."""
        shard, now = replica.shard, self.now
        took = replica.orders is not None and replica.orders_at <= now
        if took:
            self._apply_orders(replica)
        span = shard.begin(now, self._setup.most_steps)
        if span is None and took:  # nothing to compute: the report comes at once
            self._apply(replica, Outcome(shard.orders_applied))
        self._dispatch()
        if replica.deciding:  # a boundary came sooner than was thought
            self._decide(replica)
        self._wake(replica)
        if span is None:
            if replica.orders is not None:
                self._push(replica.orders_at, self._take_orders, replica, replica.session)
        else:
            if replica.orders is None and not replica.deciding and self.scheduler.wants_orders(replica.index):
                span.steps = 1  # it cannot decide yet: the next report may change that
            self._await_end(replica)
        replica.at_boundary = False

    def _apply_orders(self, replica: Replica) -> None:
        orders, replica.orders = replica.orders, None
        assert orders is not None, "there are orders to apply"
        replica.shard.apply(orders, replica.arrivals)
        if len(replica.shard) > self._setup.policy.max_batch_size:
            raise BrokenRule(f"{len(replica.shard)} sequences run on a replica")
        if replica.audit is not None:
            replica.audit.admitted(orders, replica.shard)

    def _catch_up(self, replica: Replica) -> None:
        """Record the steps of a span that are over, while it goes on."""
        span = replica.shard.span
        if span is not None and 0 < (done := span.steps_until(self.now)) < span.steps:
            self._record(replica, done)

    def _record(self, replica: Replica, steps: int) -> None:
        """The first `steps` steps of the span are over."""
        shard, ledger = replica.shard, self.ledger
        span = shard.span
        assert span is not None, "only a span that began brings anything"
        if replica.audit is not None:
            replica.audit.stepped(span, steps)
        if self.fairness is not None:
            for sequence in span.decoding:
                self.fairness.serve(sequence.arrival.tenant, steps)
            for sequence, chunk in span.chunks:
                self.fairness.serve(sequence.arrival.tenant, chunk)
        outcome = shard.advance(steps)
        last = span.step(steps)
        replica.step_seconds = (span.step(steps - 1) if steps > 1 else replica.step_seconds[1], last)
        ledger.compute(outcome.prefilled, outcome.step_s, self.now)
        if replica.audit is not None:
            replica.audit.forget(outcome.finished, span)
        deliveries = self._apply(replica, outcome)
        for record in ledger.deliver(deliveries, span, steps):
            self._answered(record)

    def _apply(self, replica: Replica, outcome: Outcome) -> Deliveries:
        since = perf_counter()
        deliveries = self.scheduler.apply(replica.index, outcome, self.now)
        replica.acknowledged = outcome.orders_applied
        self.timings.apply.add(since)
        self._fail(deliveries)
        return deliveries

    def _answered(self, record: Record) -> None:
        """A client has its whole answer."""
        arrival = record.arrival
        if arrival.follow_up is None:
            return
        answer = self._setup.ids[arrival.answer_at : arrival.answer_at + arrival.new_tokens]
        self.ideal.answer(arrival.prompt, answer)
        following = arrival.follow_up(self.now)
        if following is not None and following.at < self._setup.until:
            self._push(following.at, self._arrive, following)

    # ------------------------------------------------------------------------------------------------- loss and return

    def _open(self, replica: Replica) -> None:
        replica.is_open = True
        self._fail(self.scheduler.open(replica.index, self._spec, self.now))
        self._dispatch()

    def _lose(self, replica: Replica, seconds: float) -> None:
        if not replica.is_open:
            return
        self._catch_up(replica)
        replica.is_open = False
        replica.reset()
        self._fail(self.scheduler.lose(replica.index, self.now))
        self._push(self.now + seconds, self._open, replica)
        self._dispatch()
