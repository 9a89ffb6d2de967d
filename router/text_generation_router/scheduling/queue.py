"""FairQueue: the order in which queued sequences get their turn. Fair between tenants, urgent first, no starvation.

1. Requeued sequences (preempted, or their replica was lost) go first, in order of arrival.
2. Between tenants the smallest key goes next, ties by arrival of the tenant's next sequence.

       key = tokens served / weight - LEAD[priority of the tenant's next sequence]

   Service is charged by the caller (`charge`); for tenants that had nothing waiting see `fairness`. A priority buys a
   bounded lead, in tokens: a tenant that floods the queue at a high priority gets that far ahead of the others, once. A
   low priority puts it that far behind, at most.
3. Within a tenant the earliest due time goes next, ties by arrival.

       due = arrival time + AGEING_S x priority, at most first_token_by, at least the arrival time

   So each priority is first come, first served, and a bulk request goes before interactive ones that came 60 s after it.
   A `first_token_by` before the arrival counts as the arrival: such a request does not overtake those already waiting.

With one tenant and one priority this is first come, first served. All operations are O(log n) amortised.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from operator import attrgetter

from text_generation_router.request import Priority, QualityOfService, TenantId
from text_generation_router.scheduling.fairness import Tenant, Tenants
from text_generation_router.scheduling.lazy_heap import Key, LazyHeap
from text_generation_router.scheduling.sequence import ScheduledSequence

AGEING_S = 30.0
"""Seconds of waiting that make up for one priority level."""
LEAD = {Priority.SYSTEM: 64_000, Priority.INTERACTIVE: 16_000, Priority.DEFAULT: 0, Priority.BULK: -16_000}
"""Virtual tokens by which a priority is ahead between tenants."""


def due_time(qos: QualityOfService, arrived_at: float) -> float:
    """Return the time in seconds at which a request should have its turn; it orders the sequences of one tenant."""
    by_priority = arrived_at + AGEING_S * qos.priority
    if qos.first_token_by is None:
        return by_priority
    return max(arrived_at, min(by_priority, qos.first_token_by))


def _tenant_key(tenant: Tenant) -> Key:
    assert tenant.head is not None, "only tenants with a head are compared"
    return tenant.counter - LEAD[tenant.head.request.qos.priority], tenant.head.arrival


class FairQueue:
    """The waiting sequences, in fair order."""

    def __init__(self, weights: Mapping[TenantId, float]) -> None:
        self.tenants = Tenants(weights)
        self._sequences: dict[int, ScheduledSequence] = {}
        """By arrival."""
        self._ready: LazyHeap[Tenant] = LazyHeap(_tenant_key)
        """Tenants with a head."""
        self._requeued: LazyHeap[ScheduledSequence] = LazyHeap(attrgetter("queue_key"))
        self.work = 0
        """Expected tokens of the queue."""

    def put(self, sequence: ScheduledSequence) -> None:
        self._enqueue(sequence, due_time(sequence.request.qos, sequence.arrived_at))

    def requeue(self, sequence: ScheduledSequence) -> None:
        """Queue a sequence that left the queue before, ahead of all others."""
        sequence.requeued = True
        self._enqueue(sequence, sequence.arrival)

    def peek(self) -> ScheduledSequence | None:
        """Return the sequence that goes next, or None. Skipped ones do not count."""
        if (sequence := self._requeued.first()) is not None:
            return sequence
        tenant = self._ready.first()
        return None if tenant is None else tenant.head

    def remove(self, sequence: ScheduledSequence) -> None:
        """Remove a queued sequence, skipped or not. Charge nothing."""
        assert sequence.arrival in self._sequences, "only a queued sequence is removed"
        tenant = self.tenants[sequence.request.qos.tenant]
        if not sequence.skipped:
            self._hide(sequence, tenant)
        sequence.skipped = False
        del self._sequences[sequence.arrival]
        self.work -= sequence.work
        self.tenants.dequeue(tenant, sequence.work, waited=not sequence.requeued)

    def skip(self, sequence: ScheduledSequence) -> None:
        """Skip a queued sequence until `unskip`, so that those behind it get their turn. It may be removed."""
        assert not sequence.skipped, "a sequence is skipped once"
        sequence.skipped = True
        self._hide(sequence, self.tenants[sequence.request.qos.tenant])

    def unskip(self, sequences: Iterable[ScheduledSequence]) -> None:
        """Give skipped sequences their turn again. Those that left the queue meanwhile are ignored."""
        for sequence in sequences:
            if sequence.skipped:
                sequence.skipped = False
                self._show(sequence, self.tenants[sequence.request.qos.tenant])

    def charge(self, tenant: TenantId, tokens: int) -> None:
        """Charge `tenant`, which has a queued or running sequence; negative tokens correct an earlier charge."""
        account = self.tenants.charge(tenant, tokens)
        if tokens < 0 and account.head is not None:
            self._ready.put(account)

    def __len__(self) -> int:
        """Return the number of queued sequences, including skipped ones."""
        return len(self._sequences)

    def __iter__(self) -> Iterator[ScheduledSequence]:
        """Iterate over all queued sequences, in the order in which they were queued."""
        return iter(self._sequences.values())

    def exceeds(self, limit: int, work: int, tenant: TenantId) -> bool:
        """Return True if `work` more tokens of `tenant` would exceed `limit`.

        A tenant below its share of the queue may exceed it, up to twice the limit.
        """
        total = self.work + work
        if not self._sequences or total <= limit:
            return False
        return total > 2 * limit or self.tenants.work(tenant) + work > limit * self.tenants.share(tenant)

    def check_invariants(self) -> None:
        """Raise AssertionError unless counters, order and accounts agree with the queued sequences."""
        sequences = list(self)
        self.tenants.check_invariants(sequences)
        assert self.work == sum(sequence.work for sequence in sequences)
        assert len(sequences) == sum(tenant.queued for tenant in self.tenants)
        assert len(self._requeued) == sum(sequence.requeued and not sequence.skipped for sequence in sequences)
        assert len(self._ready) == sum(tenant.head is not None for tenant in self.tenants)

    def _enqueue(self, sequence: ScheduledSequence, rank: float) -> None:
        arrival = sequence.arrival
        assert arrival not in self._sequences, "a sequence is queued once"
        sequence.queue_key, sequence.skipped = (rank, arrival), False
        tenant = self.tenants.enqueue(sequence.request.qos.tenant, sequence.work, waits=not sequence.requeued)
        self._sequences[arrival] = sequence
        self.work += sequence.work
        self._show(sequence, tenant)

    def _show(self, sequence: ScheduledSequence, tenant: Tenant) -> None:
        if sequence.requeued:
            self._requeued.put(sequence)
            return
        tenant.line.put(sequence)
        if tenant.head is None or sequence.queue_key < tenant.head.queue_key:
            tenant.head = sequence
            self._ready.put(tenant)

    def _hide(self, sequence: ScheduledSequence, tenant: Tenant) -> None:
        if sequence.requeued:
            self._requeued.discard(sequence)
            return
        tenant.line.discard(sequence)
        if sequence is tenant.head:
            tenant.head = tenant.line.first()
            if tenant.head is None:
                self._ready.discard(tenant)
            else:
                self._ready.put(tenant)
