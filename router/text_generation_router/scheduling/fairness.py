"""Fairness: the tokens served to each tenant, as virtual token counters (arXiv 2401.00588).

The counter of a tenant is its service over its weight, in virtual tokens. The queue serves the smallest counter next, so
tenants that always have requests waiting are served in proportion to their weights.

A tenant with nothing waiting saves nothing up: when it waits again its counter is raised to the smallest one among the
waiting tenants; it is never lowered. Tenants that only run something do not count for that minimum (as in the paper): one
long generation would hold it down, and the next tenant to wait would be owed all that others were served meanwhile. While
no tenant waits, the minimum is the counter of the last one that did: use of an idle server is not held against a tenant.

The minimum stands still as long as new tenants keep entering at it, and a tenant above it (by a debt, or by a low
priority) would wait all that time. So there is also a virtual time, as in weighted fair queueing: it rises by tokens over
the weight of all active tenants, and a tenant enters at most LAG behind it. Among tenants that stay it changes nothing:
their counters keep up with it.

Memory: an idle tenant is forgotten unless it is in debt (its counter is above the value at which it would enter). Of
those in debt, the last MAX_IDLE are kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from text_generation_router.request import TenantId
from text_generation_router.scheduling.lazy_heap import Key, LazyHeap
from text_generation_router.scheduling.sequence import ScheduledSequence

LAG = 80_000.0
"""Virtual tokens by which a tenant may enter behind virtual time: the largest lead that priorities give (`queue.LEAD`)."""
MAX_IDLE = 4096
"""Idle tenants whose debt is remembered."""
MIN_WEIGHT, MAX_WEIGHT = 0.001, 1000.0
WEIGHT_UNITS = 2**20
"""Weights are multiples of 1 / WEIGHT_UNITS, so that their sums are exact."""


def _queue_key(sequence: ScheduledSequence) -> Key:
    return sequence.queue_key


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
    work: int = 0
    """Expected tokens of the queued sequences."""
    line: LazyHeap[ScheduledSequence] = field(default_factory=lambda: LazyHeap(_queue_key))
    """Waiting sequences, except skipped ones."""
    head: ScheduledSequence | None = None
    """The first in `line`."""

    @property
    def active(self) -> bool:
        """True if it has a queued or running sequence."""
        return bool(self.queued or self.running)


def _by_counter(tenant: Tenant) -> Key:
    return tenant.counter, tenant.number


class Tenants:
    """The accounts of active tenants and of idle ones in debt."""

    def __init__(self, weights: Mapping[TenantId, float]) -> None:
        """`weights` are MIN_WEIGHT to MAX_WEIGHT, by default 1. Raise ValueError for others."""
        for name, weight in weights.items():
            if not MIN_WEIGHT <= weight <= MAX_WEIGHT:
                raise ValueError(f"the weight of tenant {name!r} must be {MIN_WEIGHT} to {MAX_WEIGHT}, not {weight}")
        self._weights = {name: round(weight * WEIGHT_UNITS) / WEIGHT_UNITS for name, weight in weights.items()}
        self._known: dict[TenantId, Tenant] = {}
        self._appeared = 0
        self._waiting: LazyHeap[Tenant] = LazyHeap(_by_counter)
        self._idle: OrderedDict[TenantId, Tenant] = OrderedDict()
        """Tenants in debt, in the order in which they became idle."""
        self._debts: LazyHeap[Tenant] = LazyHeap(_by_counter)
        """The same tenants by counter."""
        self._active_weight = 0.0
        self._last_waiting_counter = 0.0
        self._virtual_time = 0.0

    def __len__(self) -> int:
        """Return the number of tenants in memory: active ones, and idle ones in debt."""
        return len(self._known)

    def find(self, name: TenantId) -> Tenant | None:
        """Return the account of `name`, or None."""
        return self._known.get(name)

    def work(self, name: TenantId) -> int:
        """Return the expected tokens of the queued sequences of `name`."""
        tenant = self._known.get(name)
        return 0 if tenant is None else tenant.work

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
        tenant = self._known.get(name)
        assert tenant is not None, "a sequence starts before it ends"
        assert tenant.running, "a sequence starts before it ends"
        tenant.running -= 1
        self._deactivate(tenant)

    def charge(self, name: TenantId, tokens: int) -> Tenant | None:
        """Charge `name` for tokens; negative ones correct an earlier charge. Return None if there is no such account."""
        tenant = self._known.get(name)
        if tenant is None:
            if tokens <= 0:
                return None  # no debt, and credit is not saved up
            tenant = self._open(name)
        tenant.counter += tokens / tenant.weight
        if self._active_weight:
            self._virtual_time += tokens / self._active_weight
        if not tenant.active:
            self._remember(tenant)
        elif tokens < 0 and tenant.waiting:
            self._waiting.put(tenant)
        return tenant

    def check_invariants(self, queued: Iterable[ScheduledSequence]) -> None:
        """Raise AssertionError unless the accounts agree with the `queued` sequences."""
        by_tenant: dict[TenantId, list[ScheduledSequence]] = {}
        for sequence in queued:
            by_tenant.setdefault(sequence.request.qos.tenant, []).append(sequence)
        assert by_tenant.keys() <= self._known.keys(), "the tenant of a queued sequence is known"
        for tenant in self._known.values():
            sequences = by_tenant.get(tenant.name, [])
            waiting = [sequence for sequence in sequences if not sequence.requeued]
            assert (tenant.queued, tenant.waiting) == (len(sequences), len(waiting))
            assert tenant.work == sum(sequence.work for sequence in sequences)
            assert len(tenant.line) == sum(not sequence.skipped for sequence in waiting)
            assert tenant.head is tenant.line.first()
            assert tenant.active != (tenant.name in self._idle), "a tenant is active or remembered for its debt"
        active = [tenant for tenant in self._known.values() if tenant.active]
        assert self._active_weight == sum(tenant.weight for tenant in active)
        assert len(self._waiting) == sum(tenant.waiting > 0 for tenant in active)

    def _entry_counter(self) -> float:
        """Return the smallest counter with which a tenant that had nothing waiting may enter."""
        lowest = self.min_counter
        # A correction may be made under another total weight than its charge: bound the drift of virtual time.
        self._virtual_time = min(max(self._virtual_time, lowest), lowest + 2 * LAG)
        return max(lowest, self._virtual_time - LAG)

    def _open(self, name: TenantId) -> Tenant:
        self._appeared += 1
        tenant = Tenant(name, self._appeared, self._weights.get(name, 1.0), self.min_counter)
        self._known[name] = tenant
        return tenant

    def _activate(self, name: TenantId) -> Tenant:
        tenant = self._known.get(name) or self._open(name)
        if not tenant.active:
            self._forget_debt(tenant)
            self._active_weight += tenant.weight
        return tenant

    def _deactivate(self, tenant: Tenant) -> None:
        """Handle that `tenant` may have become idle."""
        if tenant.active:
            return
        self._active_weight -= tenant.weight
        self._remember(tenant)

    def _remember(self, tenant: Tenant) -> None:
        """Keep the idle `tenant` for its debt, and drop those without one or beyond MAX_IDLE."""
        # Never `tenant` itself: between its turn and the charge for it, it may seem to have no debt.
        lowest = self.min_counter
        while (paid := self._debts.first()) is not None and paid is not tenant and paid.counter <= lowest:
            self._drop(paid)
        self._idle[tenant.name] = tenant
        self._debts.put(tenant)
        if len(self._idle) > MAX_IDLE:
            self._drop(next(iter(self._idle.values())))

    def _drop(self, tenant: Tenant) -> None:
        self._forget_debt(tenant)
        del self._known[tenant.name]

    def _forget_debt(self, tenant: Tenant) -> None:
        self._idle.pop(tenant.name, None)
        self._debts.discard(tenant)
