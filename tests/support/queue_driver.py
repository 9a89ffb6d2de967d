"""QueueDriver: fills a FairQueue and serves its sequences one at a time."""

from __future__ import annotations

from text_generation_router.request import Priority, QualityOfService, Request, RequestId, TenantId
from text_generation_router.scheduling.queue import FairQueue
from text_generation_router.scheduling.sequence import ScheduledSequence

A, B, C = TenantId("a"), TenantId("b"), TenantId("c")
WORK = 1000


class QueueDriver:
    """A queue and a server that serves one sequence at a time."""

    def __init__(self, weights: dict[TenantId, float] | None = None) -> None:
        self.queue = FairQueue(weights or {})
        self.arrivals = 0
        self.served: dict[TenantId, int] = {A: 0, B: 0, C: 0}

    def put(
        self,
        tenant: TenantId = A,
        priority: Priority = Priority.DEFAULT,
        arrived_at: float = 0.0,
        work: int = WORK,
        first_token_by: float | None = None,
    ) -> ScheduledSequence:
        """Queue a new sequence and return it."""
        self.arrivals += 1
        qos = QualityOfService(tenant, priority, first_token_by=first_token_by)
        request = Request(RequestId(self.arrivals), (1,), 1, qos=qos)
        sequence = ScheduledSequence(request, self.arrivals, arrived_at, 1, work=work)
        self.queue.put(sequence)
        return sequence

    def put_all(self, *tenants: TenantId) -> list[ScheduledSequence]:
        return [self.put(tenant) for tenant in tenants]

    def charge(self, tenant: TenantId, tokens: int) -> None:
        """Charge for a sequence that ends at once."""
        self.queue.tenants.started(tenant)
        self.queue.charge(tenant, tokens)
        self.queue.tenants.ended(tenant)

    def serve(self) -> ScheduledSequence:
        """Remove the next sequence, charge for it, run and end it."""
        sequence = self.queue.peek()
        assert sequence is not None
        tenant = sequence.request.qos.tenant
        self.queue.tenants.started(tenant)
        self.queue.remove(sequence)
        self.queue.charge(tenant, sequence.work)
        self.queue.tenants.ended(tenant)
        self.served[tenant] = self.served.get(tenant, 0) + sequence.work
        return sequence

    def tenants(self, count: int) -> list[TenantId]:
        """Serve `count` sequences and return their tenants in order."""
        return [self.serve().request.qos.tenant for _ in range(count)]

    def order(self) -> list[int]:
        """Serve all sequences and return their arrival numbers in order."""
        order = []
        while self.queue.peek() is not None:
            order.append(self.serve().arrival)
            self.queue.check_invariants()
        return order
