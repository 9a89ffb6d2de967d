"""A discrete-event simulation of time, clients, the wire and replicas around the real scheduler.

Events: requests arrive, clients leave, spans of steps end, orders are decided and reach a replica, deadlines pass,
replicas are lost and come back. A replica does not wait for orders: its next step starts at once, and orders take effect
at the first boundary after they arrive.

A span of many steps is one event. It is cut at the next boundary when something happens for its replica. In reality each
step would have been reported by then; here they are reported only where that may change a decision: while orders are not
acknowledged. Otherwise the scheduler only sees some texts a few tokens too short.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from time import perf_counter

from text_generation_bench.simulator.autoscaling import SYNC_S, Autoscaler
from text_generation_bench.simulator.config import SimConfig
from text_generation_bench.simulator.measures import FairnessMeter, IdealPrefixCache
from text_generation_bench.simulator.replica import HostContents, KvAudit, SimulatedReplica, check_orders
from text_generation_bench.simulator.shard import RuleViolation, SimulatedShard
from text_generation_bench.simulator.statistics import LiveRequest, SchedulerTimings, Statistics
from text_generation_bench.simulator.traces import Arrival, Trace
from text_generation_proto.cache_groups import CacheGroup
from text_generation_router.request import QualityOfService, Request, RequestId
from text_generation_router.scheduling.messages import Deliveries, ReplicaSpec, StepOutput
from text_generation_router.shards.replica import HOLD_SHARE, MIN_STEP_S

MAX_IDEAL_PREFIXES = 1_000_000
"""Most prefixes remembered for the ideal hit rate."""
MAX_DRAIN_S = 86_400.0
"""Longest time after `until` in which all requests must end."""
DEFAULT_QOS = QualityOfService()


class Simulator:
    """One run of a simulation. Raises RuleViolation if the scheduler violates a rule."""

    def __init__(self, config: SimConfig) -> None:
        self.config = config
        self._cost_model = cost_model = config.cost_model
        states = (CacheGroup(cost_model.states, is_state=True),) if cost_model.states else ()
        blocks, size = cost_model.kv_tokens // cost_model.block_size, cost_model.block_size
        host = cost_model.host_tokens // size
        name = "host" if host else ""
        self._spec = ReplicaSpec(
            cost_model.slots, blocks, size, further_groups=states, host_cache=name, host_blocks=host
        )
        self._host: HostContents = {}
        self.scheduler = config.scheduler(config.policy, config.replicas)
        self.statistics = Statistics(config.targets)
        self.timings = SchedulerTimings()
        self.ideal = IdealPrefixCache(cost_model.block_size, MAX_IDEAL_PREFIXES)
        self.fairness = FairnessMeter() if config.with_fairness else None
        self.events = 0
        """Number of events so far."""
        self.now = 0.0
        """Simulated time, in seconds."""
        self._heap: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._pushed = 0
        self._requests = 0
        self._expiry_at = math.inf
        self._next_tick = 1.0
        # An estimate costs time in proportion to the replicas, so it is made for a sample of the requests.
        self._estimate_every = max(1, config.replicas // 4)
        self.autoscaler = Autoscaler(config.scaling, self.scheduler, config.replicas) if config.scaling else None
        self._replicas = [self._new_replica(index) for index in range(config.replicas)]

    def _new_replica(self, index: int) -> SimulatedReplica:
        shard = SimulatedShard(self._cost_model, self._spec.num_slots, self.config.ids)
        audit = KvAudit(self._cost_model, self._spec.num_blocks, self.config.ids) if self.config.audited else None
        return SimulatedReplica(index, shard, audit)

    # ------------------------------------------------------------------------------------------------------------ time

    def run(self, trace: Trace) -> None:
        """Simulate `trace` until the last request has ended."""
        if self.autoscaler is None:
            for replica in self._replicas:
                self._open(replica)
        else:
            self._open(self._replicas[0])
            self._push(SYNC_S, self._scale, self.autoscaler)
        for outage in self.config.outages:
            self._push(outage.at, self._lose, self._replicas[outage.replica], outage.seconds)
        heap, fairness, latest = self._heap, self.fairness, self.config.until + MAX_DRAIN_S
        arrival = next(trace, None)
        while arrival is not None or heap:
            self.events += 1
            if self.now > latest:
                raise RuleViolation(f"{len(self.statistics.live)} requests do not end")
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

    def _tick(self, fairness: FairnessMeter) -> None:
        while self.now >= self._next_tick:
            self._next_tick += 1.0
            fairness.tick(self.statistics.waiting)

    def _check_the_end(self) -> None:
        scheduler = self.scheduler
        if self.statistics.live:
            raise RuleViolation(f"{len(self.statistics.live)} requests never ended")
        stats = scheduler.stats()
        if scheduler.requests or stats.waiting or stats.queued_tokens:
            raise RuleViolation(f"{len(scheduler.requests)} requests are still in the scheduler at the end")
        if stats.running or stats.kv_usage:
            raise RuleViolation(
                f"{stats.running} slots and {stats.kv_usage:.2%} of the blocks are still held at the end"
            )

    # --------------------------------------------------------------------------------------------------------- clients

    def _arrive(self, arrival: Arrival) -> None:
        now, statistics, scheduler = self.now, self.statistics, self.scheduler
        request_id = RequestId(self._requests)
        self._requests += 1
        qos = DEFAULT_QOS if self.config.blind else arrival.qos
        request = Request(request_id, arrival.prompt, arrival.max_new_tokens, qos=qos)
        if not scheduler.capacity.fits(len(request.prompt), request.max_new_tokens) or scheduler.exceeds_queue_limit(
            request
        ):
            statistics.reject(arrival, now)
            return
        estimate = None
        if request_id % self._estimate_every == 0:
            estimate = scheduler.estimated_wait(request.qos.tenant)
        statistics.arrive(request_id, arrival, now, estimate)
        self.ideal.add_prompt(arrival.prompt)
        since = perf_counter()
        scheduler.submit(request, now)
        self.timings.submit.add(since)
        if request.qos != DEFAULT_QOS:
            self._watch_expiry()
        leaves = arrival.leaves_after_s
        if self.config.blind and arrival.total_s is not None:
            # The scheduler does not know the deadline, so the client leaves when it passes.
            leaves = arrival.total_s if leaves is None else min(leaves, arrival.total_s)
        if leaves is not None:
            self._push(now + leaves, self._leave, request_id)
        self._dispatch()

    def _leave(self, request_id: RequestId) -> None:
        if request_id in self.statistics.live:
            self.scheduler.cancel(request_id)
            self._ended(request_id, self.statistics.leave(request_id))

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
            self._ended(failed.request_id, self.statistics.fail(failed.request_id, failed.kind))

    def _ended(self, request_id: RequestId, record: LiveRequest) -> None:
        """Handle a request that was ended by the client or a deadline: its replica may have orders to send."""
        if record.replica >= 0:
            self._wake(self._replicas[record.replica])
        self._dispatch()

    # ------------------------------------------------------------------------------------------------------- decisions

    def _dispatch(self) -> None:
        if not self.scheduler.queue:
            return
        since = perf_counter()
        given = self.scheduler.dispatch()
        self.timings.dispatch.add(since)
        for index in given:
            self._wake(self._replicas[index])

    def _wake(self, replica: SimulatedReplica) -> None:
        """Decide for a replica now, or later in a long step."""
        if replica.deciding or replica.orders is not None or not self.scheduler.may_have_orders(replica.index):
            return
        span, step = replica.shard.span, min(replica.step_seconds)
        if span is not None and step >= MIN_STEP_S:
            began = span.start + span.seconds(span.steps_until(self.now))
            if (at := began + HOLD_SHARE * step) > self.now:
                replica.deciding = True
                replica.holds += 1
                self._push(at, self._end_delay, replica, replica.session, replica.holds)
                return
        self._decide(replica)

    def _end_delay(self, replica: SimulatedReplica, session: int, hold: int) -> None:
        if session == replica.session and hold == replica.holds and replica.deciding:
            self._decide(replica)

    def _decide(self, replica: SimulatedReplica) -> None:
        replica.deciding = False
        shard, now = replica.shard, self.now
        if replica.acknowledged < shard.orders_applied:
            self._catch_up(replica)
        since = perf_counter()
        orders = self.scheduler.schedule(replica.index)
        self.timings.decide.add(since)
        if orders is None:
            if shard.span is not None and self.scheduler.may_have_orders(replica.index):
                self._cut(replica, now)
            return
        check_orders(orders, self.config.policy)
        replica.arrivals = {new.request.id: self._arrival(new.request.id) for new in orders.placements}
        self.statistics.order(replica.index, orders, now)
        replica.orders = orders
        replica.orders_at = now + self._cost_model.orders_delay_s
        if shard.span is not None:
            self._cut(replica, replica.orders_at)
        elif not replica.at_boundary:
            self._push(replica.orders_at, self._take_orders, replica, replica.session)

    def _arrival(self, request_id: RequestId) -> Arrival:
        if (record := self.statistics.live.get(request_id)) is None:
            raise RuleViolation(f"request {request_id} was admitted after its end")
        return record.arrival

    # -------------------------------------------------------------------------------------------------------- replicas

    def _cut(self, replica: SimulatedReplica, after: float) -> None:
        """End the span at the first boundary at or after `after`."""
        span = replica.shard.span
        assert span is not None, "no span to cut"
        span.steps = span.steps_to_boundary(after)
        if not replica.at_boundary:
            self._await_end(replica)

    def _await_end(self, replica: SimulatedReplica) -> None:
        span = replica.shard.span
        assert span is not None, "no span to end"
        if span.end != replica.end_at:
            replica.version += 1
            replica.end_at = span.end
            self._push(span.end, self._end_span, replica, replica.session, replica.version)

    def _end_span(self, replica: SimulatedReplica, session: int, version: int) -> None:
        span = replica.shard.span
        if session != replica.session or version != replica.version or span is None:
            return
        replica.at_boundary = True
        self._record(replica, span.steps)
        self._begin(replica)

    def _take_orders(self, replica: SimulatedReplica, session: int) -> None:
        if session == replica.session:
            replica.at_boundary = True
            self._begin(replica)

    def _begin(self, replica: SimulatedReplica) -> None:
        """Handle a step boundary: apply orders that have arrived and start the next span."""
        shard, now = replica.shard, self.now
        took = replica.orders is not None and replica.orders_at <= now
        if took:
            self._apply_orders(replica)
        span = shard.begin(now, self.config.max_span_steps)
        if span is None and took:  # nothing to compute: the report follows at once
            self._apply(replica, StepOutput(shard.orders_applied))
        self._dispatch()
        if replica.deciding:  # the boundary came before the end of the delay
            self._decide(replica)
        self._wake(replica)
        if span is None:
            if replica.orders is not None:
                self._push(replica.orders_at, self._take_orders, replica, replica.session)
        else:
            if replica.orders is None and not replica.deciding and self.scheduler.may_have_orders(replica.index):
                span.steps = 1  # no decision is possible before the next report
            self._await_end(replica)
        replica.at_boundary = False

    def _apply_orders(self, replica: SimulatedReplica) -> None:
        orders, replica.orders = replica.orders, None
        assert orders is not None, "no orders to apply"
        replica.shard.apply(orders, replica.arrivals)
        if (end := replica.shard.begin_copies(orders, self.now)) is not None:
            self._push(end, self._end_copies, replica, replica.session)
        if len(replica.shard) > self.config.policy.max_batch_size:
            raise RuleViolation(f"{len(replica.shard)} sequences run on a replica")
        if replica.audit is not None:
            replica.audit.admitted(orders, replica.shard)

    def _end_copies(self, replica: SimulatedReplica, session: int) -> None:
        """Let a replica report its copies at the next boundary, at once without a step."""
        if session == replica.session and replica.shard.span is not None:
            self._cut(replica, self.now)
        elif session == replica.session:
            self._apply(replica, StepOutput(replica.shard.orders_applied))
            self._dispatch()
            self._wake(replica)

    def _catch_up(self, replica: SimulatedReplica) -> None:
        """Report the ended steps of a span that continues."""
        span = replica.shard.span
        if span is not None and 0 < (done := span.steps_until(self.now)) < span.steps:
            self._record(replica, done)

    def _record(self, replica: SimulatedReplica, steps: int) -> None:
        """Report the first `steps` steps of the span."""
        shard, statistics = replica.shard, self.statistics
        span = shard.span
        assert span is not None, "no span to report"
        if replica.audit is not None:
            replica.audit.stepped(span, steps)
        if self.fairness is not None:
            for sequence in span.decoding:
                self.fairness.serve(sequence.arrival.job or sequence.arrival.tenant, steps)
            for sequence, chunk in span.chunks:
                self.fairness.serve(sequence.arrival.job or sequence.arrival.tenant, chunk)
        outcome = shard.advance(steps)
        last = span.step(steps)
        replica.step_seconds = (span.step(steps - 1) if steps > 1 else replica.step_seconds[1], last)
        statistics.compute(outcome.prefilled, outcome.step_s, self.now)
        if replica.audit is not None:
            replica.audit.forget(outcome.finished, span)
        deliveries = self._apply(replica, outcome)
        for record in statistics.deliver(deliveries, span, steps):
            self._answered(record)

    def _apply(self, replica: SimulatedReplica, outcome: StepOutput) -> Deliveries:
        since = perf_counter()
        outcome.copied = replica.end_copies(self.now, self._host)
        deliveries = self.scheduler.update(replica.index, outcome, self.now)
        replica.acknowledged = outcome.orders_applied
        self.timings.apply.add(since)
        self._fail(deliveries)
        return deliveries

    def _answered(self, record: LiveRequest) -> None:
        """Let the client of a finished request send its next one."""
        arrival = record.arrival
        if arrival.follow_up is None:
            return
        answer = self.config.ids[arrival.answer_at : arrival.answer_at + arrival.new_tokens]
        self.ideal.add_answer(arrival.prompt, answer)
        following = arrival.follow_up(self.now)
        for each in (following, *following.siblings) if following is not None else ():
            if each.at < self.config.until or each.job:  # a job that began ends
                self._push(each.at, self._arrive, each)

    # ------------------------------------------------------------------------------------------- outages, autoscaling

    def _open(self, replica: SimulatedReplica) -> None:
        replica.is_open = True
        self._fail(self.scheduler.open(replica.index, self._spec))
        self._dispatch()

    def _lose(self, replica: SimulatedReplica, seconds: float) -> None:
        if replica.is_open:
            self._close(replica)
            self._push(self.now + seconds, self._open, replica)

    def _close(self, replica: SimulatedReplica) -> None:
        self._catch_up(replica)
        replica.is_open = False
        replica.reset()
        self._fail(self.scheduler.lose(replica.index))
        self._dispatch()

    def _scale(self, autoscaler: Autoscaler) -> None:
        opened, closed = autoscaler.step(self.now, self.statistics.busy_s)
        for number in opened:
            self._open(self._replicas[number])
        for number in closed:
            self._close(self._replicas[number])
        if self.now + SYNC_S <= self.config.until:
            self._push(self.now + SYNC_S, self._scale, autoscaler)

    @property
    def replica_seconds(self) -> float:
        """Time that replicas ran so far, in sum."""
        return self.now * self.config.replicas if self.autoscaler is None else self.autoscaler.replica_seconds(self.now)
