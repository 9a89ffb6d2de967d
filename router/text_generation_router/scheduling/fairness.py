"""Fairness: the tokens served to each tenant, as virtual token counters (arXiv 2401.00588).

The counter of a tenant is its service over its weight, in virtual tokens. The queue serves the smallest counter next, so
tenants that always have requests waiting are served in proportion to their weights.

A tenant with nothing waiting does not accumulate credit: when it waits again its counter is raised to the smallest one among the
waiting tenants; it is never lowered. Tenants that only run something do not count for that minimum (as in the paper): one
long generation would hold it down, and the next tenant to wait would be owed all that others were served meanwhile. While
no tenant waits, the minimum is the counter of the last one that did: use of an idle server is not held against a tenant.

The minimum stands still as long as new tenants keep entering at it, and a tenant above it (by a debt, or by a low
priority) would wait all that time. So there is also a virtual time, as in weighted fair queueing: it rises by tokens over
the weight of all active tenants, and a tenant enters at most LAG behind it. Among tenants that stay it changes nothing:
their counters keep up with it.

The jobs of a tenant (a session and its sub-agents) have accounts of the same kind, in a `Tenants` of its own.

Memory: an idle tenant is forgotten unless it is in debt (its counter is above the value at which it would enter). The
MAX_IDLE largest debts are kept. A later correction may lower that value: a tenant that was forgotten enters like a new one.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter

from text_generation_router.request import Priority, TenantId
from text_generation_router.scheduling.lazy_heap import Key, LazyHeap
from text_generation_router.scheduling.sequence import ScheduledSequence

LEAD = {Priority.SYSTEM: 64_000, Priority.INTERACTIVE: 16_000, Priority.DEFAULT: 0, Priority.BULK: -16_000}
"""Virtual tokens by which a priority is ahead between tenants, and between jobs."""
AGEING_S = 30.0
"""Seconds by which a request is due later for each priority level below the first."""
TARGET_LEAD = 16_000 / AGEING_S
"""Virtual tokens by which a job is ahead of others for each second that its next sequence is due earlier than by its priority, as
a target for the first token asks: as many as a priority level gives."""
WARMTH = 4
"""Tokens by which a job may be ahead of another for each token that its next sequence has less to compute. So a turn goes before cold
prompts while its context is cached: served in turns, the contexts of all jobs would push each other out of the cache."""
LAG = 80_000.0
"""Virtual tokens by which a tenant may enter behind virtual time: the largest lead that priorities give."""
MAX_IDLE, MAX_IDLE_JOBS = 4096, 64
"""Idle tenants, and jobs of a tenant, whose debt is remembered."""
WEIGHT_UNITS = 2**20
"""Weights are multiples of 1 / WEIGHT_UNITS, so that their sums are exact."""


@dataclass(slots=True, eq=False)
class Tenant:
    """The account of one tenant, or of one of its jobs, and its sequences that wait for their first turn."""

    name: str
    number: int
    """Order of appearance, for ties."""
    weight: float
    counter: float
    """Virtual tokens: tokens served over weight, plus raises."""
    waiting: int = 0
    """Queued sequences that have not run yet."""
    queued: int = 0
    """All queued sequences, including requeued ones."""
    running: int = 0
    charged: int = 0
    """Tokens charged so far, corrections included."""
    work: int = 0
    """Expected tokens of the queued sequences."""
    line: LazyHeap[ScheduledSequence] = field(default_factory=lambda: LazyHeap(attrgetter("queue_key")))
    """Waiting sequences, except skipped ones, and of a tenant those of jobs."""
    jobs: "Tenants | None" = None
    """The accounts of the jobs of a tenant; None before the first."""
    head: ScheduledSequence | None = None
    """The sequence that goes next."""

    is_job: bool = False
    """True for the account of a job."""

    @property
    def active(self) -> bool:
        return bool(self.queued or self.running)

    def first(self) -> ScheduledSequence | None:
        """Return the sequence that goes next: of those that belong to no job, or of the job with the least claim."""
        alone = self.line.first()
        job = None if self.jobs is None else self.jobs.ready.first()
        if job is None or (alone is not None and (_claim(alone.entry, alone), alone.arrival) <= _by_claim(job)):
            return alone
        return job.head


def _claim(counter: float, sequence: ScheduledSequence) -> float:
    """Return the virtual tokens by which a job gets its turn: those served, less the leads, and WARMTH times the work.

    That of the work is less than LAG, by which new jobs enter behind: so a long prompt is passed by few of them.
    """
    priority, due = sequence.request.qos.priority, sequence.queue_key[0]
    lead = LEAD[priority] + TARGET_LEAD * (sequence.arrived_at + AGEING_S * priority - due)
    return counter - lead + min(WARMTH * sequence.work, LAG / 2)


def _by_claim(tenant: Tenant) -> Key:
    head = tenant.head
    assert head is not None, "only accounts with a head are compared"
    if tenant.is_job:
        return _claim(tenant.counter, head), head.arrival
    return tenant.counter - LEAD[head.request.qos.priority], head.arrival


def _by_counter(tenant: Tenant) -> Key:
    return tenant.counter, tenant.number


class Tenants:
    """The accounts of active tenants (with a queued or running sequence), and of idle ones in debt."""

    def __init__(self, weights: Mapping[TenantId, float], *, of_jobs: bool = False) -> None:
        """`weights` are 0.001 to 1000, by default 1: see `config.Weights`. `of_jobs`: the accounts are of one tenant's jobs."""
        self._of_jobs = of_jobs
        self.ready: LazyHeap[Tenant] = LazyHeap(_by_claim)
        """Tenants with a head, the one that goes next first."""
        self._weights: dict[str, float] = {
            name: round(weight * WEIGHT_UNITS) / WEIGHT_UNITS for name, weight in weights.items()
        }
        self._known: dict[str, Tenant] = {}
        self._appeared = 0
        self._waiting: LazyHeap[Tenant] = LazyHeap(_by_counter)
        self._idle: LazyHeap[Tenant] = LazyHeap(_by_counter)
        self._active_weight = 0.0
        self._last_waiting_counter = 0.0
        self._virtual_time = 0.0

    def __iter__(self) -> Iterator[Tenant]:
        return iter(self._known.values())

    def __getitem__(self, name: str) -> Tenant:
        """Return the account of `name`, which is active or in debt."""
        return self._known[name]

    def work(self, name: str) -> int:
        """Return the expected tokens of the queued sequences of `name`."""
        return self._known[name].work if name in self._known else 0

    @property
    def min_counter(self) -> float:
        """The smallest counter of waiting tenants; without any, that of the last one that waited."""
        tenant = self._waiting.first()
        return self._last_waiting_counter if tenant is None else tenant.counter

    def share(self, name: str) -> float:
        """Return the part of the service, in (0, 1], that `name` gets while all active tenants have enough to do."""
        tenant = self._known.get(name)
        if tenant is not None and tenant.active:
            return tenant.weight / self._active_weight
        weight = self._weights.get(name, 1.0)
        return weight / (self._active_weight + weight)

    def enqueue(self, name: str, work: int, *, waits: bool) -> Tenant:
        """Count a sequence of `work` tokens into the queue; it `waits` for its first turn, or was requeued."""
        tenant = self._activate(name)
        if waits:
            if not tenant.waiting:
                tenant.counter = max(tenant.counter, self.entry_counter)
            tenant.waiting += 1
            self._waiting.put(tenant)
        tenant.queued += 1
        tenant.work += work
        return tenant

    def dequeue(self, tenant: Tenant, work: int, *, waited: bool) -> None:
        """Count a sequence of `work` tokens out of the queue."""
        tenant.queued -= 1
        tenant.work -= work
        if waited:
            tenant.waiting -= 1
            if not tenant.waiting:
                self._waiting.discard(tenant)
                if not self._waiting:
                    self._last_waiting_counter = max(self._last_waiting_counter, tenant.counter)
                    self._virtual_time = self._last_waiting_counter
        self._deactivate(tenant)

    def started(self, name: str) -> Tenant:
        """Count a sequence of `name` that was placed."""
        tenant = self._activate(name)
        tenant.running += 1
        return tenant

    def ended(self, name: str) -> None:
        """Count a sequence of `name` that left its replica."""
        tenant = self._known[name]
        assert tenant.running, "a sequence starts before it ends"
        tenant.running -= 1
        self._deactivate(tenant)

    def charge(self, name: str, tokens: int) -> Tenant:
        """Charge `name`, which is active, for tokens; negative ones correct an earlier charge."""
        tenant = self._known[name]
        tenant.charged += tokens
        tenant.counter += tokens / tenant.weight
        self._virtual_time += tokens / self._active_weight
        if tokens < 0:
            if tenant.waiting:
                self._waiting.put(tenant)
            if tenant.head is not None:
                self.ready.put(tenant)
        return tenant

    def advance(self, tokens: float) -> None:
        """Let virtual time rise by what was served to others: a sequence of no job is a job of its own, without an account."""
        self._virtual_time += tokens

    def choose(self, tenant: Tenant) -> None:
        """Look again which of its sequences goes next."""
        head = tenant.first()
        if head is tenant.head:
            return
        tenant.head = head
        if head is None:
            self.ready.discard(tenant)
        else:
            self.ready.put(tenant)

    @property
    def entry_counter(self) -> float:
        """Return the smallest counter with which a tenant that had nothing waiting may enter."""
        lowest = self.min_counter
        # A correction may be made under another total weight than its charge: bound the drift of virtual time.
        self._virtual_time = min(max(self._virtual_time, lowest), lowest + 2 * LAG)
        return max(lowest, self._virtual_time - LAG)

    def _activate(self, name: str) -> Tenant:
        tenant = self._known.get(name)
        if tenant is None:
            self._appeared += 1
            weight = self._weights.get(name, 1.0)
            tenant = Tenant(name, self._appeared, weight, self.min_counter, is_job=self._of_jobs)
            self._known[name] = tenant
        if not tenant.active:
            self._idle.discard(tenant)
            self._active_weight += tenant.weight
        return tenant

    def _deactivate(self, tenant: Tenant) -> None:
        """If `tenant` became idle, forget it and all others unless they are in debt."""
        if tenant.active:
            return
        self._active_weight -= tenant.weight
        self._idle.put(tenant)
        lowest = self.min_counter
        most = MAX_IDLE_JOBS if self._of_jobs else MAX_IDLE
        while (least := self._idle.first()) is not None and (least.counter <= lowest or len(self._idle) > most):
            self._idle.discard(least)
            del self._known[least.name]
