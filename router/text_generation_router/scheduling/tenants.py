"""Tenants: how many tokens each was served, so that the queue can be fair. A virtual token counter (arXiv 2401.00588).

A tenant's counter is its service over its weight, in virtual tokens. The queue lets the least go next, so tenants that
always have something waiting are served in proportion to their weights.

Who has nothing waiting saves nothing up: when it comes to wait again, its counter is lifted to the least among those
that wait; it is never lowered. A tenant that only runs something is no measure here (the paper's rule as well): its one
long text would hold the least counter down, and who comes next would be owed all that the others were served meanwhile.
While nobody waits, the measure is the counter of the last one that did: use of an idle server is held against nobody.

The least counter stands still while ever new tenants come in at it, and whoever is above it (by a debt, or by a low
class) would wait for as long as they come. So there is also a virtual time, as in weighted fair queueing: it rises by
tokens over the weight of all active tenants, whoever is served, and newcomers come in at most LAG behind it. With tenants
that stay it makes no difference: their counters are as far as it is.

Memory: an idle tenant is forgotten unless it is in debt (its counter is above what it would be lifted to), and of those
in debt the MAX_IDLE latest are remembered.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from text_generation_router.request import TenantId
from text_generation_router.scheduling.lazy_heap import Key, LazyHeap

LAG = 80_000.0
"""Virtual tokens that a newcomer may come in behind virtual time; all that the classes can buy (`queue.LEAD`)."""
MAX_IDLE = 4096
"""Idle tenants whose debt is remembered."""
LEAST_WEIGHT, MOST_WEIGHT = 0.001, 1000.0
WEIGHT_UNITS = 2**20
"""Weights are whole numbers of units (a unit is 1 / WEIGHT_UNITS), so that sums of them are exact and never drift."""


@dataclass(slots=True, eq=False)
class Tenant:
    """One tenant's account."""

    name: TenantId
    number: int
    """Order of appearance: settles ties."""
    weight: float
    counter: float
    """Virtual tokens: tokens served over weight, and what it was lifted by."""
    waiting: int = 0
    """Queued entries that wait for their first turn."""
    queued: int = 0
    """All queued entries: also those that were sent back."""
    running: int = 0
    work: int = 0
    """Tokens that the queued entries are expected to cost."""

    @property
    def active(self) -> bool:
        """Whether it has anything queued or running."""
        return bool(self.queued or self.running)


def _by_counter(tenant: Tenant) -> Key:
    return tenant.counter, tenant.number


class Tenants:
    """The accounts of all tenants that matter now."""

    def __init__(self, weights: Mapping[TenantId, float]) -> None:
        """`weights` are between LEAST_WEIGHT and MOST_WEIGHT; who is not named has 1. Raises ValueError."""
        for name, weight in weights.items():
            if not LEAST_WEIGHT <= weight <= MOST_WEIGHT:
                raise ValueError(f"the weight of tenant {name!r} must be {LEAST_WEIGHT} to {MOST_WEIGHT}, not {weight}")
        self._weights = {name: round(weight * WEIGHT_UNITS) / WEIGHT_UNITS for name, weight in weights.items()}
        self._known: dict[TenantId, Tenant] = {}
        self._appeared = 0
        self._waiting: LazyHeap[Tenant] = LazyHeap(_by_counter)
        self._idle: OrderedDict[TenantId, Tenant] = OrderedDict()
        """Those in debt, in the order in which they became idle."""
        self._debts: LazyHeap[Tenant] = LazyHeap(_by_counter)
        """The same by counter."""
        self._active_weight = 0.0
        self._level = 0.0
        """Counter of the last tenant that waited, when it left."""
        self._virtual_time = 0.0

    def __len__(self) -> int:
        """Accounts in memory."""
        return len(self._known)

    def find(self, name: TenantId) -> Tenant | None:
        """The account of `name`, if there is one."""
        return self._known.get(name)

    @property
    def least(self) -> float:
        """The least counter among tenants that wait; the last one's if none does."""
        tenant = self._waiting.first()
        return self._level if tenant is None else tenant.counter

    def share(self, name: TenantId) -> float:
        """What part of the service `name` gets while all that are active now want all they can get; in (0, 1]."""
        tenant = self._known.get(name)
        if tenant is not None and tenant.active:
            return tenant.weight / self._active_weight
        weight = self._weights.get(name, 1.0)
        return weight / (self._active_weight + weight)

    # ----------------------------------------------------------------------------------------------- queued and running

    def queue(self, name: TenantId, work: int, *, waits: bool) -> Tenant:
        """An entry of `work` tokens joins the queue; it `waits` for its first turn, or was sent back."""
        tenant = self._enliven(name)
        if waits:
            if not tenant.waiting:
                tenant.counter = max(tenant.counter, self._entrance())
            tenant.waiting += 1
            self._waiting.put(tenant)
        tenant.queued += 1
        tenant.work += work
        return tenant

    def leave(self, tenant: Tenant, work: int, *, waited: bool) -> None:
        """An entry of `work` tokens left the queue, for whatever reason."""
        tenant.queued -= 1
        tenant.work -= work
        if waited:
            tenant.waiting -= 1
            if not tenant.waiting:
                self._waiting.discard(tenant)
                if not self._waiting:
                    self._virtual_time = self._level = max(self._level, tenant.counter)
        self._settle(tenant)

    def started(self, name: TenantId) -> None:
        """An entry of `name` runs."""
        self._enliven(name).running += 1

    def ended(self, name: TenantId) -> None:
        """An entry of `name` runs no more."""
        tenant = self._known.get(name)
        assert tenant is not None, "what ends has started"
        assert tenant.running, "what ends has started"
        tenant.running -= 1
        self._settle(tenant)

    def charge(self, name: TenantId, tokens: int) -> Tenant | None:
        """`name` was served so many tokens; fewer than none: it was charged too much. None: nobody remembers it."""
        tenant = self._known.get(name)
        if tenant is None:
            if tokens <= 0:
                return None  # it owes nothing, and has nothing to save up
            tenant = self._open(name)
        tenant.counter += tokens / tenant.weight
        if self._active_weight:
            self._virtual_time += tokens / self._active_weight
        if not tenant.active:
            self._remember(tenant)
        elif tokens < 0 and tenant.waiting:
            self._waiting.put(tenant)
        return tenant

    # ---------------------------------------------------------------------------------------------------------- private

    def _entrance(self) -> float:
        """Where a tenant comes in that had nothing waiting."""
        least = self.least
        # Corrections may have been made under another weight than the charges: drift must not pile up.
        self._virtual_time = min(max(self._virtual_time, least), least + 2 * LAG)
        return max(least, self._virtual_time - LAG)

    def _open(self, name: TenantId) -> Tenant:
        self._appeared += 1
        tenant = Tenant(name, self._appeared, self._weights.get(name, 1.0), self.least)
        self._known[name] = tenant
        return tenant

    def _enliven(self, name: TenantId) -> Tenant:
        tenant = self._known.get(name) or self._open(name)
        if not tenant.active:
            self._forget_debt(tenant)
            self._active_weight += tenant.weight
        return tenant

    def _settle(self, tenant: Tenant) -> None:
        """Look whether `tenant` became idle."""
        if tenant.active:
            return
        self._active_weight -= tenant.weight
        self._remember(tenant)

    def _remember(self, tenant: Tenant) -> None:
        """Keep the idle `tenant` for its debt, if it has one, and let go of those that need not be kept."""
        # Not `tenant` itself: between its turn and the charge for it, it may look as if it owed nothing.
        least = self.least
        while (paid := self._debts.first()) is not None and paid is not tenant and paid.counter <= least:
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
