"""Order, lags and memory of the queue. All operations against a simple model: tests/property/test_queue.py."""

from __future__ import annotations

import gc

import pytest
from scheduler_checks import check_queue

from text_generation_router.config import RouterConfig
from text_generation_router.request import Priority, QualityOfService, Request, RequestId, TenantId
from text_generation_router.scheduling.fairness import LAG, LEAD, MAX_IDLE, MAX_IDLE_JOBS
from text_generation_router.scheduling.queue import AGEING_S, FairQueue
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
        job: str = "",
    ) -> ScheduledSequence:
        """Queue a new sequence and return it."""
        self.arrivals += 1
        qos = QualityOfService(tenant, priority, first_token_by=first_token_by, job=job)
        request = Request(RequestId(self.arrivals), (1,), 1, qos=qos)
        sequence = ScheduledSequence(request, self.arrivals, arrived_at, 1, work=work)
        self.queue.put(sequence)
        return sequence

    def charge(self, tenant: TenantId, tokens: int) -> None:
        """Charge for a sequence that ends at once."""
        self.queue.tenants.started(tenant)
        self.queue.tenants.charge(tenant, tokens)
        self.queue.tenants.ended(tenant)

    def serve(self) -> ScheduledSequence:
        """Remove the next sequence, charge for it, run and end it."""
        sequence = self.queue.peek()
        assert sequence is not None
        self.queue.started(sequence)
        self.queue.remove(sequence)
        self.queue.charge(sequence, sequence.work)
        self.queue.ended(sequence)
        return sequence

    def order(self) -> list[int]:
        """Serve all sequences and return their arrival numbers in order."""
        order = []
        while self.queue.peek() is not None:
            order.append(self.serve().arrival)
            check_queue(self.queue)
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


def test_jobs_of_a_tenant_get_equal_shares_however_many_requests_each_has(driver: QueueDriver) -> None:
    for _ in range(16):
        driver.put(job="many")
    for _ in range(4):
        driver.put(job="few")
    names = [driver.serve().job for _ in range(8)]
    assert names.count("few") == 4


def test_a_warm_turn_goes_before_a_cold_prompt_of_equal_claim(driver: QueueDriver) -> None:
    cold = driver.put(job="new", work=20 * WORK)
    warm = driver.put(job="old", work=WORK)
    assert driver.order() == [warm.arrival, cold.arrival]


def test_a_job_that_was_served_more_goes_later_although_it_is_warm(driver: QueueDriver) -> None:
    driver.put(job="served", work=8 * WORK)
    driver.serve()
    other = driver.put(job="other", work=2 * WORK)
    driver.put(job="served", work=WORK)
    assert driver.serve() is other


def test_jobs_of_another_tenant_have_no_effect(driver: QueueDriver) -> None:
    for _ in range(4):
        driver.put(A, job="session")
    mine = driver.put(B, job="session")
    driver.serve()
    assert driver.serve() is mine, "the same name is another job"


def test_a_job_is_not_starved_by_requests_of_no_job(driver: QueueDriver) -> None:
    driver.put(job="served", work=2 * int(LAG))
    driver.serve()
    turn = driver.put(job="served", work=2 * WORK)
    driver.put()
    served = 0
    while driver.serve() is not turn:
        driver.put()
        served += WORK
    assert served < 4 * LAG


def test_idle_jobs_are_forgotten(driver: QueueDriver) -> None:
    driver.queue.skip(driver.put(job="waits"))
    for number in range(3 * MAX_IDLE_JOBS):
        driver.put(job=str(number), work=WORK + number)
        driver.serve()
    (tenant,) = driver.queue.tenants
    assert tenant.jobs is not None
    assert 1 < len(list(tenant.jobs)) <= MAX_IDLE_JOBS + 1
    check_queue(driver.queue)
