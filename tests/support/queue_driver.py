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
        self.served: dict[TenantId, int] = {}

    def sequence(self, qos: QualityOfService, arrived_at: float = 0.0, work: int = WORK) -> ScheduledSequence:
        self.arrivals += 1
        request = Request(RequestId(self.arrivals), (1,), 1, qos=qos)
        return ScheduledSequence(request, self.arrivals, arrived_at, 1, work=work)

    def put(
        self,
        tenant: TenantId = A,
        priority: Priority = Priority.DEFAULT,
        arrived_at: float = 0.0,
        work: int = WORK,
        first_token_by: float | None = None,
        queue_by: float | None = None,
        end_by: float | None = None,
    ) -> ScheduledSequence:
        """Queue a new sequence and return it."""
        qos = QualityOfService(tenant, priority, "", first_token_by, queue_by, end_by)
        sequence = self.sequence(qos, arrived_at, work)
        self.queue.put(sequence)
        return sequence

    def pop(self) -> ScheduledSequence:
        """Remove and return the next sequence."""
        sequence = self.queue.peek()
        assert sequence is not None
        self.queue.remove(sequence)
        return sequence

    def skip(self) -> ScheduledSequence:
        """Skip and return the next sequence."""
        sequence = self.queue.peek()
        assert sequence is not None
        self.queue.skip(sequence)
        return sequence

    def serve(self) -> ScheduledSequence:
        """Remove the next sequence, charge for it, run and end it."""
        sequence = self.pop()
        tenant = sequence.request.qos.tenant
        self.queue.charge(tenant, sequence.work)
        self.queue.tenants.started(tenant)
        self.queue.tenants.ended(tenant)
        self.served[tenant] = self.served.get(tenant, 0) + sequence.work
        self.queue.check_invariants()
        return sequence

    def order(self) -> list[int]:
        """Serve all sequences and return their arrival numbers in order."""
        order = []
        while self.queue.peek() is not None:
            order.append(self.serve().arrival)
        return order
