"""The queue against a simple model of its rules: the same sequences in the same order."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from scheduler_checks import check_queue

from text_generation_router.request import Priority, QualityOfService, Request, RequestId, TenantId
from text_generation_router.scheduling.fairness import LAG, LEAD
from text_generation_router.scheduling.queue import AGEING_S, FairQueue
from text_generation_router.scheduling.sequence import ScheduledSequence

TENANTS = [TenantId(name) for name in ("a", "b", "c", "d")]


@dataclass(eq=False)
class Waiter:
    """A sequence, and the model's view of its place in the queue."""

    sequence: ScheduledSequence
    sent_back: bool = False
    aside: bool = False

    @property
    def qos(self) -> QualityOfService:
        return self.sequence.request.qos

    @property
    def arrival(self) -> int:
        return self.sequence.arrival

    @property
    def work(self) -> int:
        return self.sequence.work

    @property
    def rank(self) -> tuple[float, int]:
        """The order within its tenant."""
        arrived = self.sequence.arrived_at
        by_class = arrived + AGEING_S * self.qos.priority
        hope = self.qos.first_token_by
        return (by_class if hope is None else max(arrived, min(hope, by_class))), self.arrival


@dataclass
class Naive:
    """The rules without data structures."""

    weights: dict[TenantId, float]
    queued: list[Waiter] = field(default_factory=list)
    counters: dict[TenantId, float] = field(default_factory=dict)
    running: dict[TenantId, int] = field(default_factory=lambda: dict.fromkeys(TENANTS, 0))
    level: float = 0.0
    virtual_time: float = 0.0

    def waiting(self, tenant: TenantId | None = None) -> list[Waiter]:
        return [w for w in self.queued if not w.sent_back and tenant in (None, w.qos.tenant)]

    @property
    def least(self) -> float:
        return min((self.counters[w.qos.tenant] for w in self.waiting()), default=self.level)

    @property
    def active(self) -> list[TenantId]:
        return [t for t in TENANTS if self.running[t] or any(w.qos.tenant == t for w in self.queued)]

    @property
    def active_weight(self) -> float:
        return sum(self.weights.get(tenant, 1.0) for tenant in self.active)

    def meet(self, tenant: TenantId) -> None:
        """Open an account for a new tenant."""
        self.counters.setdefault(tenant, self.least)

    def put(self, waiter: Waiter) -> None:
        tenant = waiter.qos.tenant
        self.meet(tenant)
        if not waiter.sent_back and not self.waiting(tenant):
            least = self.least
            self.virtual_time = min(max(self.virtual_time, least), least + 2 * LAG)
            self.counters[tenant] = max(self.counters[tenant], least, self.virtual_time - LAG)
        self.queued.append(waiter)

    def next(self) -> Waiter | None:
        returning = [w for w in self.queued if w.sent_back and not w.aside]
        if returning:
            return min(returning, key=lambda w: w.arrival)
        heads = [
            min(shown, key=lambda w: w.rank)
            for tenant in TENANTS
            if (shown := [w for w in self.waiting(tenant) if not w.aside])
        ]
        return min(heads, key=self._key, default=None)

    def _key(self, head: Waiter) -> tuple[float, int]:
        return self.counters[head.qos.tenant] - LEAD[head.qos.priority], head.arrival

    def take_out(self, waiter: Waiter) -> None:
        waited = bool(self.waiting())
        self.queued.remove(waiter)
        waiter.aside = False
        if waited and not self.waiting():
            self.virtual_time = self.level = max(self.level, self.counters[waiter.qos.tenant])
        self.left(waiter.qos.tenant)

    def left(self, tenant: TenantId) -> None:
        """If a tenant is idle now, forget all that are, unless they are in debt."""
        least, idle = self.least, self.counters.keys() - self.active
        if tenant not in idle:
            return
        self.counters = {t: counter for t, counter in self.counters.items() if t not in idle or counter > least}

    def charge(self, tenant: TenantId, tokens: int) -> None:
        self.meet(tenant)
        self.counters[tenant] += tokens / self.weights.get(tenant, 1.0)
        if self.active:
            self.virtual_time += tokens / self.active_weight


class QueueMachine(RuleBasedStateMachine):
    """Clients that submit and cancel, and a server that serves at any time."""

    @initialize(weights=st.dictionaries(st.sampled_from(TENANTS), st.sampled_from([0.5, 2.0, 3.0])))
    def start(self, weights: dict[TenantId, float]) -> None:
        self.queue = FairQueue(weights)
        self.model = Naive(weights)
        self.arrivals = 0
        self.now = 0.0
        self.running: list[Waiter] = []

    @rule(
        tenant=st.sampled_from(TENANTS),
        priority=st.sampled_from(Priority),
        work=st.sampled_from([1, 500, 40_000]),
        first_token_in=st.one_of(st.none(), st.integers(0, 60)),
        passed=st.integers(0, 40),
    )
    def put(self, tenant: TenantId, priority: Priority, work: int, first_token_in: int | None, passed: int) -> None:
        self.arrivals += 1
        self.now += passed
        hope = None if first_token_in is None else self.now + first_token_in
        qos = QualityOfService(tenant, priority, first_token_by=hope)
        request = Request(RequestId(self.arrivals), (1,), 1, qos=qos)
        waiter = Waiter(ScheduledSequence(request, self.arrivals, self.now, 1, work=work))
        self.model.put(waiter)
        self.queue.put(waiter.sequence)

    @precondition(lambda self: self.queue.peek() is not None)
    @rule(times=st.integers(1, 4))
    def serve(self, times: int) -> None:
        for _ in range(times):
            expected = self.model.next()
            if expected is None:
                assert self.queue.peek() is None
                return
            assert self.queue.peek() is expected.sequence
            tenant = expected.qos.tenant
            self.queue.started(expected.sequence)
            self.queue.remove(expected.sequence)
            self.model.running[tenant] += 1
            self.model.take_out(expected)
            self.charge(expected, expected.work)
            self.running.append(expected)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), fate=st.sampled_from(["end", "end too early", "send back"]))
    def stop(self, data: st.DataObject, fate: str) -> None:
        waiter = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        tenant = waiter.qos.tenant
        if fate == "end too early":
            self.charge(waiter, -(waiter.work // 2))
        if fate == "send back":
            waiter.sent_back = True
            self.model.put(waiter)
            self.queue.requeue(waiter.sequence)
        self.model.running[tenant] -= 1
        self.model.left(tenant)
        self.queue.ended(waiter.sequence)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), tokens=st.sampled_from([-100, 1, 70_000]))
    def correct(self, data: st.DataObject, tokens: int) -> None:
        self.charge(data.draw(st.sampled_from(self.running)), tokens)

    def charge(self, waiter: Waiter, tokens: int) -> None:
        self.model.charge(waiter.qos.tenant, tokens)
        self.queue.charge(waiter.sequence, tokens)

    @precondition(lambda self: self.queue.peek() is not None)
    @rule()
    def skip(self) -> None:
        waiter = self.model.next()
        assert waiter is not None
        self.queue.skip(waiter.sequence)
        waiter.aside = True

    @rule(data=st.data())
    def unskip(self, data: st.DataObject) -> None:
        aside = data.draw(st.permutations([w for w in self.model.queued if w.aside]))
        for waiter in aside:
            waiter.aside = False
        self.queue.unskip([waiter.sequence for waiter in aside])

    @precondition(lambda self: self.model.queued)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        waiter = data.draw(st.sampled_from(self.model.queued))
        self.model.take_out(waiter)
        self.queue.remove(waiter.sequence)

    @invariant()
    def the_same_goes_next(self) -> None:
        expected = self.model.next()
        assert self.queue.peek() is (expected and expected.sequence)

    @invariant()
    def the_figures_are_right(self) -> None:
        check_queue(self.queue)
        queued = self.model.queued
        assert len(self.queue) == len(queued)
        assert list(self.queue) == [waiter.sequence for waiter in queued]
        assert self.queue.work == sum(waiter.work for waiter in queued)
        weight = self.model.active_weight
        for tenant in TENANTS:
            assert self.queue.tenants.work(tenant) == sum(w.work for w in queued if w.qos.tenant == tenant)
            own = self.model.weights.get(tenant, 1.0)
            assert self.queue.tenants.share(tenant) == own / (weight if tenant in self.model.active else weight + own)

    def teardown(self) -> None:
        if not hasattr(self, "queue"):
            return
        self.queue.unskip([waiter.sequence for waiter in self.model.queued if waiter.aside])
        for waiter in self.model.queued:
            waiter.aside = False
        while self.queue.peek() is not None:
            self.serve(1)
        assert not self.model.queued


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(stateful_step_count=60)


def test_a_tenant_that_was_raised_and_served_nothing_enters_like_a_new_one_after_a_correction() -> None:
    machine, (a, b, c, _) = QueueMachine(), TENANTS
    machine.start({})

    def put(tenant: TenantId) -> None:
        machine.put(tenant, Priority.DEFAULT, 500, None, 0)
        machine.the_figures_are_right()
        machine.the_same_goes_next()

    def leave(waiter: Waiter) -> None:
        machine.model.take_out(waiter)
        machine.queue.remove(waiter.sequence)

    put(b)
    machine.serve(1)
    put(b)
    put(a)
    leave(machine.model.queued[-1])  # it entered at the counter of b
    machine.charge(machine.running[0], -100)
    put(a)
    put(c)
    leave(machine.model.queued[0])
    machine.the_same_goes_next()
