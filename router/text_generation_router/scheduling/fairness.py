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

Memory: an idle tenant is forgotten unless it is in debt (its counter is above the value at which it would enter). The
MAX_IDLE largest debts are kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from text_generation_router.request import TenantId
from text_generation_router.scheduling.lazy_heap import Key, LazyHeap
from text_generation_router.scheduling.sequence import ScheduledSequence

LAG = 80_000.0
"""Virtual tokens by which a tenant may enter behind virtual time: the largest lead that priorities give (`queue.LEAD`)."""
MAX_IDLE = 4096
"""Idle tenants whose debt is remembered."""
WEIGHT_UNITS = 2**20
"""Weights are multiples of 1 / WEIGHT_UNITS, so that their sums are exact."""


@dataclass(slots=True, eq=False)
class Tenant:
    """The account of one tenant, and its sequences that wait for their first turn."""

    name: TenantId
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
    """Waiting sequences, except skipped ones."""
    head: ScheduledSequence | None = None
    """The first in `line`."""

    @property
    def active(self) -> bool:
        return bool(self.queued or self.running)


def _by_counter(tenant: Tenant) -> Key:
    return tenant.counter, tenant.number


class Tenants:
    """The accounts of active tenants (with a queued or running sequence), and of idle ones in debt."""

    def __init__(self, weights: Mapping[TenantId, float]) -> None:
        """`weights` are 0.001 to 1000, by default 1: see `config.Weights`."""
        self._weights = {name: round(weight * WEIGHT_UNITS) / WEIGHT_UNITS for name, weight in weights.items()}
        self._known: dict[TenantId, Tenant] = {}
        self._appeared = 0
        self._waiting: LazyHeap[Tenant] = LazyHeap(_by_counter)
        self._idle: LazyHeap[Tenant] = LazyHeap(_by_counter)
        self._active_weight = 0.0
        self._last_waiting_counter = 0.0
        self._virtual_time = 0.0

    def __iter__(self) -> Iterator[Tenant]:
        return iter(self._known.values())

    def __getitem__(self, name: TenantId) -> Tenant:
        """Return the account of `name`, which is active or in debt."""
        return self._known[name]

    def work(self, name: TenantId) -> int:
        """Return the expected tokens of the queued sequences of `name`."""
        return self._known[name].work if name in self._known else 0

    @property
    def min_counter(self) -> float:
        """The smallest counter of waiting tenants; without any, that of the last one that waited."""
        tenant = self._waiting.first()
        return self._last_waiting_counter if tenant is None else tenant.counter

    def share(self, name: TenantId) -> float:
        """Return the part of the service, in (0, 1], that `name` gets while all active tenants have enough to do."""
        tenant = self._known.get(name)
        if tenant is not None and tenant.active:
            return tenant.weight / self._active_weight
        weight = self._weights.get(name, 1.0)
        return weight / (self._active_weight + weight)

    def enqueue(self, name: TenantId, work: int, *, waits: bool) -> Tenant:
        """Count a sequence of `work` tokens into the queue; it `waits` for its first turn, or was requeued."""
        tenant = self._activate(name)
        if waits:
            if not tenant.waiting:
                tenant.counter = max(tenant.counter, self._entry_counter())
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

    def started(self, name: TenantId) -> None:
        """Count a sequence of `name` that was placed."""
        self._activate(name).running += 1

    def ended(self, name: TenantId) -> None:
        """Count a sequence of `name` that left its replica."""
        tenant = self._known[name]
        assert tenant.running, "a sequence starts before it ends"
        tenant.running -= 1
        self._deactivate(tenant)

    def charge(self, name: TenantId, tokens: int) -> Tenant:
        """Charge `name`, which is active, for tokens; negative ones correct an earlier charge."""
        tenant = self._known[name]
        tenant.charged += tokens
        tenant.counter += tokens / tenant.weight
        self._virtual_time += tokens / self._active_weight
        if tokens < 0 and tenant.waiting:
            self._waiting.put(tenant)
        return tenant

    def check_invariants(self, queued: Sequence[ScheduledSequence]) -> None:
        """Raise AssertionError unless the accounts agree with the `queued` sequences."""
        for tenant in self:
            own = [sequence for sequence in queued if sequence.request.qos.tenant == tenant.name]
            waiting = [sequence for sequence in own if not sequence.requeued]
            assert (tenant.queued, tenant.waiting) == (len(own), len(waiting))
            assert tenant.work == sum(sequence.work for sequence in own)
            assert len(tenant.line) == sum(not sequence.skipped for sequence in waiting)
            assert tenant.head is tenant.line.first()
        assert self._active_weight == sum(tenant.weight for tenant in self if tenant.active)
        assert len(self._waiting) == sum(tenant.waiting > 0 for tenant in self)
        assert len(self._idle) == sum(not tenant.active for tenant in self)

    def _entry_counter(self) -> float:
        """Return the smallest counter with which a tenant that had nothing waiting may enter."""
        lowest = self.min_counter
        # A correction may be made under another total weight than its charge: bound the drift of virtual time.
        self._virtual_time = min(max(self._virtual_time, lowest), lowest + 2 * LAG)
        return max(lowest, self._virtual_time - LAG)

    def _activate(self, name: TenantId) -> Tenant:
        tenant = self._known.get(name)
        if tenant is None:
            self._appeared += 1
            tenant = Tenant(name, self._appeared, self._weights.get(name, 1.0), self.min_counter)
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
        while (least := self._idle.first()) is not None and (least.counter <= lowest or len(self._idle) > MAX_IDLE):
            self._idle.discard(least)
            del self._known[least.name]
