"""FairQueue: the order in which queued sequences get their turn. Fair between tenants and jobs, urgent first, no starvation.

1. Requeued sequences (preempted, or their replica was lost) go first, in order of arrival.
2. Between tenants the smallest key goes next, ties by arrival of the tenant's next sequence.

       key = tokens served / weight - LEAD[priority of the tenant's next sequence]

   Service is charged by the caller (`charge`); for tenants that had nothing waiting see `fairness`. A priority buys a
   bounded lead, in tokens: a tenant that floods the queue at a high priority gets that far ahead of the others, once. A
   low priority puts it that far behind, at most.
3. Within a tenant the same between its jobs, where the key is

       key = tokens served to the job - lead of its next sequence + WARMTH x its work, at most LAG / 2

   The lead is that of its priority, and TARGET_LEAD for each second that it is due earlier than by that. The work is there
   so that a turn whose context is cached goes before a cold prompt of equal claim. A sequence that belongs to no job is a job
   of its own, which was served nothing.
4. Within a job, and between sequences of no job, the earliest due time goes next, ties by arrival.

       due = arrival time + AGEING_S x priority, at most first_token_by, at least the arrival time

   So each priority is first come, first served, and a bulk request goes before interactive ones that came 60 s after it.
   A `first_token_by` before the arrival counts as the arrival: such a request does not overtake those already waiting.

With one tenant, one priority and no jobs this is first come, first served. All operations are O(log n) amortised.
"""

from collections.abc import Iterable, Iterator, Mapping
from operator import attrgetter

from text_generation_router.request import QualityOfService, TenantId
from text_generation_router.scheduling.fairness import AGEING_S, Tenant, Tenants
from text_generation_router.scheduling.jobs import PrefixJobs
from text_generation_router.scheduling.lazy_heap import LazyHeap
from text_generation_router.scheduling.sequence import ScheduledSequence


def due_time(qos: QualityOfService, arrived_at: float) -> float:
    """Return the time in seconds at which a request should have its turn; it orders the sequences of one tenant."""
    by_priority = arrived_at + AGEING_S * qos.priority
    if qos.first_token_by is None:
        return by_priority
    return max(arrived_at, min(by_priority, qos.first_token_by))


class FairQueue:
    """The waiting sequences, in fair order."""

    def __init__(self, weights: Mapping[TenantId, float]) -> None:
        self.tenants = Tenants(weights)
        self.prefix_jobs = PrefixJobs()
        self._sequences: dict[int, ScheduledSequence] = {}
        """By arrival."""
        self._requeued: LazyHeap[ScheduledSequence] = LazyHeap(attrgetter("queue_key"))
        self.work = 0
        """Expected tokens of the queue."""

    def put(self, sequence: ScheduledSequence) -> None:
        sequence.job = sequence.job or self.prefix_jobs.name(sequence)
        self._enqueue(sequence, due_time(sequence.request.qos, sequence.arrived_at))

    def requeue(self, sequence: ScheduledSequence) -> None:
        """Queue a sequence that left the queue before, ahead of all others."""
        sequence.requeued = True
        self._enqueue(sequence, sequence.arrival)

    def peek(self) -> ScheduledSequence | None:
        """Return the sequence that goes next, or None. Skipped ones do not count."""
        if (sequence := self._requeued.first()) is not None:
            return sequence
        tenant = self.tenants.ready.first()
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
        if sequence.job:
            jobs = _jobs(tenant)
            jobs.dequeue(jobs[sequence.job], sequence.work, waited=not sequence.requeued)
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

    def started(self, sequence: ScheduledSequence) -> None:
        """Count a sequence that was placed; before it is removed."""
        tenant = self.tenants.started(sequence.request.qos.tenant)
        if sequence.job:
            _jobs(tenant).started(sequence.job)

    def ended(self, sequence: ScheduledSequence) -> None:
        """Count a sequence that left its replica."""
        tenant = self.tenants[sequence.request.qos.tenant]
        if sequence.job:
            _jobs(tenant).ended(sequence.job)
        self.tenants.ended(tenant.name)

    def charge(self, sequence: ScheduledSequence, tokens: int) -> None:
        """Charge the tenant and the job of a queued or running sequence; negative tokens correct an earlier charge."""
        tenant = self.tenants.charge(sequence.request.qos.tenant, tokens)
        if sequence.job:
            _jobs(tenant).charge(sequence.job, tokens)
            self.tenants.choose(tenant)
        elif tenant.jobs is not None:
            tenant.jobs.advance(tokens / (tenant.queued + tenant.running))

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

    def _enqueue(self, sequence: ScheduledSequence, rank: float) -> None:
        arrival = sequence.arrival
        assert arrival not in self._sequences, "a sequence is queued once"
        sequence.queue_key, sequence.skipped = (rank, arrival), False
        tenant = self.tenants.enqueue(sequence.request.qos.tenant, sequence.work, waits=not sequence.requeued)
        sequence.entry = 0.0 if tenant.jobs is None else tenant.jobs.entry_counter
        if sequence.job:
            _jobs(tenant).enqueue(sequence.job, sequence.work, waits=not sequence.requeued)
        self._sequences[arrival] = sequence
        self.work += sequence.work
        self._show(sequence, tenant)

    def _show(self, sequence: ScheduledSequence, tenant: Tenant) -> None:
        if sequence.requeued:
            self._requeued.put(sequence)
        else:
            _account(sequence, tenant).line.put(sequence)
            self._choose(sequence, tenant)

    def _hide(self, sequence: ScheduledSequence, tenant: Tenant) -> None:
        if sequence.requeued:
            self._requeued.discard(sequence)
        else:
            _account(sequence, tenant).line.discard(sequence)
            self._choose(sequence, tenant)

    def _choose(self, sequence: ScheduledSequence, tenant: Tenant) -> None:
        """Look again which sequence of the job, and of the tenant, goes next."""
        if sequence.job:
            _jobs(tenant).choose(_account(sequence, tenant))
        self.tenants.choose(tenant)


def _jobs(tenant: Tenant) -> Tenants:
    if tenant.jobs is None:
        tenant.jobs = Tenants({}, of_jobs=True)
    return tenant.jobs


def _account(sequence: ScheduledSequence, tenant: Tenant) -> Tenant:
    """Return the account in whose line a sequence waits: of its job, else of its tenant."""
    return _jobs(tenant)[sequence.job] if sequence.job else tenant
