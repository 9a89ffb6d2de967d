"""A desk that fills a FairQueue and serves who it names, one entry at a time."""

from __future__ import annotations

from dataclasses import dataclass

from text_generation_router.request import Priority, QualityOfService, Request, RequestId, TenantId
from text_generation_router.scheduling.queue import FairQueue

A, B, C = TenantId("a"), TenantId("b"), TenantId("c")
WORK = 1000


@dataclass(eq=False)
class Waiter:
    request: Request
    arrived: float
    arrival: int
    work: int


class Desk:
    """Makes entries, and plays a server that serves one entry at a time."""

    def __init__(self, weights: dict[TenantId, float] | None = None) -> None:
        self.queue: FairQueue[Waiter] = FairQueue(weights or {})
        self.arrivals = 0
        self.served: dict[TenantId, int] = {}

    def entry(self, service: QualityOfService, arrived: float = 0.0, work: int = WORK) -> Waiter:
        self.arrivals += 1
        request = Request(RequestId(self.arrivals), (1,), 1, qos=service)
        return Waiter(request, arrived, self.arrivals, work)

    def put(
        self,
        tenant: TenantId = A,
        priority: Priority = Priority.DEFAULT,
        arrived: float = 0.0,
        work: int = WORK,
        first_token_by: float | None = None,
        queue_by: float | None = None,
        end_by: float | None = None,
    ) -> Waiter:
        service = QualityOfService(tenant, priority, "", first_token_by, queue_by, end_by)
        entry = self.entry(service, arrived, work)
        self.queue.put(entry)
        return entry

    def serve(self) -> Waiter:
        """Pop, charge, run and end."""
        entry = self.queue.pop()
        tenant = entry.request.qos.tenant
        self.queue.charge(tenant, entry.work)
        self.queue.started(tenant)
        self.queue.ended(tenant)
        self.served[tenant] = self.served.get(tenant, 0) + entry.work
        return entry

    def order(self) -> list[int]:
        """Arrival numbers in the order in which the queue gives its entries, each charged."""
        order = []
        while self.queue.peek() is not None:
            order.append(self.serve().arrival)
        return order
