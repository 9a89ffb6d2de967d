"""Order, lags and memory of the queue. All operations against a simple model: tests/property/test_queue.py."""

from __future__ import annotations

import gc

import pytest

from text_generation_router.config import RouterConfig
from text_generation_router.request import Priority, QualityOfService, Request, RequestId, TenantId
from text_generation_router.scheduling.fairness import LAG, MAX_IDLE
from text_generation_router.scheduling.queue import AGEING_S, LEAD, FairQueue
from text_generation_router.scheduling.sequence import ScheduledSequence

A, B = TenantId("a"), TenantId("b")
WORK = 1000
SYSTEM, INTERACTIVE, DEFAULT, BULK = Priority
MINUTE = 2 * AGEING_S


class QueueDriver:
    """A queue and a server that serves one sequence at a time."""

    def __init__(self) -> None:
        self.queue = FairQueue({})
        self.arrivals = 0

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
        return sequence

    def order(self) -> list[int]:
        """Serve all sequences and return their arrival numbers in order."""
        order = []
        while self.queue.peek() is not None:
            order.append(self.serve().arrival)
            self.queue.check_invariants()
        return order


@pytest.fixture
def driver() -> QueueDriver:
    return QueueDriver()


@pytest.mark.parametrize(
    ("requests", "order"),
    [
        pytest.param([], [], id="empty"),
        pytest.param([(DEFAULT, second, None) for second in range(5)], [1, 2, 3, 4, 5], id="first come, first served"),
        pytest.param([(priority, 0, None) for priority in reversed(Priority)], [4, 3, 2, 1], id="by priority"),
        pytest.param(
            [(BULK, 0, None), (INTERACTIVE, MINUTE - 0.1, None), (INTERACTIVE, MINUTE + 0.1, None)],
            [2, 1, 3],
            id="bulk goes before interactive of a minute later",
        ),
        pytest.param([(DEFAULT, 0, 1e6), (DEFAULT, 0.1, None), (DEFAULT, 5, 7.0)], [3, 1, 2], id="only forward"),
        pytest.param([(SYSTEM, 9, None), (DEFAULT, 10, -1e9)], [1, 2], id="a past time does not overtake"),
    ],
)
def test_the_order_within_a_tenant(
    driver: QueueDriver, requests: list[tuple[Priority, float, float | None]], order: list[int]
) -> None:
    """(priority, arrival, first_token_by) of each request."""
    for priority, arrived_at, first_token_by in requests:
        driver.put(priority=priority, arrived_at=arrived_at, first_token_by=first_token_by)
    assert driver.order() == order


@pytest.mark.parametrize("weight", [0.0, -1.0, float("inf"), float("nan"), 1e-9])
def test_an_invalid_weight_is_refused(weight: float) -> None:
    with pytest.raises(ValueError, match="tenant_weights"):
        RouterConfig(tenant_weights={"a": weight})


def test_a_stream_of_new_tenants_does_not_starve_a_waiting_one(driver: QueueDriver) -> None:
    """A new tenant arrives for each one served, and two more wait. A tenant in debt at the lowest priority still advances."""
    driver.put(TenantId("first stranger"), Priority.SYSTEM)
    driver.put(TenantId("second stranger"), Priority.SYSTEM)
    driver.charge(A, 50 * WORK)
    waiter = driver.put(A, Priority.BULK)
    others = 0
    while driver.serve() is not waiter:
        others += WORK
        driver.put(TenantId(f"stranger {others}"), Priority.SYSTEM)
        # Three wait at a time: a third of the service is its own; its debt is 50 WORK, priorities and LAG add LAG each.
        assert others <= 3 * (50 * WORK + 2 * LAG) + 3 * WORK


def test_idle_tenants_without_debt_are_forgotten(driver: QueueDriver) -> None:
    for number in range(100):
        driver.put(TenantId(str(number)))
    driver.order()
    driver.put(A)
    for _ in range(5):
        driver.put(B, work=3 * WORK)
    driver.order()
    driver.put(A)
    driver.order()
    assert len([*driver.queue.tenants]) <= 2


def test_the_largest_debts_of_idle_tenants_are_kept(driver: QueueDriver) -> None:
    driver.put(A)
    for number in range(MAX_IDLE + 100):
        driver.charge(TenantId(str(number)), 10 * WORK + number)
    assert {tenant.name for tenant in driver.queue.tenants} == {A, *map(str, range(100, MAX_IDLE + 100))}


def sequences_in_memory() -> int:
    gc.collect()
    return sum(type(each) is ScheduledSequence for each in gc.get_objects())


def test_sequences_that_left_keep_no_memory(driver: QueueDriver) -> None:
    before = sequences_in_memory()
    kept = driver.put()
    for number in range(500):
        driver.queue.remove(driver.put((A, B)[number % 2], Priority(number % 4), arrived_at=float(number)))
    assert sequences_in_memory() - before <= 5
    assert driver.order() == [kept.arrival]
    assert len(driver.queue) == driver.queue.work == 0


def test_lag_is_the_largest_lead_of_priorities() -> None:
    assert max(LEAD.values()) - min(LEAD.values()) == LAG
