"""The shares of tenants, at once and over a long time."""

from __future__ import annotations

import pytest
from queue_driver import WORK, A, B, C, QueueDriver

from text_generation_router.request import Priority, TenantId
from text_generation_router.scheduling.fairness import LAG
from text_generation_router.scheduling.queue import LEAD, FairQueue


@pytest.fixture
def driver() -> QueueDriver:
    return QueueDriver()


def jain(values: list[float]) -> float:
    return sum(values) ** 2 / (len(values) * sum(value * value for value in values))


def test_the_least_served_tenant_goes_next(driver: QueueDriver) -> None:
    for _ in range(2):
        driver.put(A)
    for _ in range(2):
        driver.put(B)
    assert driver.order() == [1, 3, 2, 4]


def test_pop_charges_nothing(driver: QueueDriver) -> None:
    for tenant in (A, A, A, B):
        driver.put(tenant)
    assert [driver.pop().arrival for _ in range(4)] == [1, 2, 3, 4]


def test_a_correction_brings_a_tenant_forward_again(driver: QueueDriver) -> None:
    for tenant in (A, A, B, B):
        driver.put(tenant)
    assert driver.serve().arrival == 1
    assert driver.queue.peek() is not None
    driver.queue.charge(A, -WORK)
    assert driver.serve().arrival == 2


def test_the_order_of_tenants_does_not_depend_on_their_names(driver: QueueDriver) -> None:
    for name in ("x", "", "long name", "0", "y"):
        driver.put(TenantId(name))
    assert driver.order() == [1, 2, 3, 4, 5]


def test_backlogged_tenants_get_equal_tokens_for_any_traffic(driver: QueueDriver) -> None:
    """A sends 10 times as many requests of 8 times the size; both always have requests waiting."""
    for second in range(400):
        for _ in range(10):
            driver.put(A, arrived_at=float(second), work=8 * 250)
        driver.put(B, arrived_at=float(second), work=250)
    while driver.queue.tenants.work(A) and driver.queue.tenants.work(B):
        driver.serve()
        if sum(driver.served.values()) > 20_000:
            assert jain([driver.served[A], driver.served[B]]) >= 0.99
    assert driver.served[B] == 400 * 250, "B was backlogged all the time"


def test_weights_divide_the_service() -> None:
    driver = QueueDriver({A: 3.0})
    for _ in range(900):
        driver.put(A)
        driver.put(B)
    for _ in range(800):
        driver.serve()
    assert driver.served[A] / driver.served[B] == pytest.approx(3.0, rel=0.01)


@pytest.mark.parametrize("weight", [0.0, -1.0, float("inf"), float("nan"), 1e-9])
def test_an_invalid_weight_raises(weight: float) -> None:
    with pytest.raises(ValueError, match="weight of tenant 'a'"):
        FairQueue({A: weight})


@pytest.mark.parametrize("runs", [False, True])
def test_a_tenant_without_waiting_requests_saves_nothing_up(driver: QueueDriver, runs: bool) -> None:
    """Not even by running one long generation, which counts as service of only a few tokens."""
    driver.put(B, work=10)
    driver.serve()
    if runs:
        driver.queue.tenants.started(B)
    for _ in range(1000):
        driver.put(A)
    for _ in range(500):
        driver.serve()
    for _ in range(100):
        driver.put(B)
    before = dict(driver.served)
    for _ in range(100):
        driver.serve()
    assert abs((driver.served[A] - before[A]) - (driver.served[B] - before[B])) <= 2 * WORK


def test_a_tenant_that_only_runs_does_not_lower_the_entry_counter(driver: QueueDriver) -> None:
    driver.put(C, work=10)
    driver.serve()
    driver.queue.tenants.started(C)
    for _ in range(1000):
        driver.put(A)
    for _ in range(500):
        driver.serve()
    for _ in range(100):
        driver.put(B)
    order = [driver.serve().request.qos.tenant for _ in range(20)]
    assert 9 <= order.count(A) <= 11


def test_returning_does_not_cancel_a_debt(driver: QueueDriver) -> None:
    for _ in range(20):
        driver.put(B)
    driver.put(A, work=10 * WORK)
    assert [driver.serve().arrival for _ in range(2)] == [1, 21]
    driver.put(A)
    order = [driver.serve().request.qos.tenant for _ in range(11)]
    assert order.index(A) == 10, "A goes next once B was served more than 10 WORK"


def test_use_of_an_idle_server_is_not_held_against_a_tenant(driver: QueueDriver) -> None:
    for _ in range(1000):
        driver.put(A)
        driver.serve()
    for _ in range(10):
        driver.put(B)
        driver.put(A)
    order = [driver.serve().request.qos.tenant for _ in range(10)]
    assert 4 <= order.count(A) <= 6


def test_a_flood_of_system_requests_gets_a_bounded_lead(driver: QueueDriver) -> None:
    for _ in range(2000):
        driver.put(A, Priority.SYSTEM)
        driver.put(B, Priority.DEFAULT)
        driver.put(C, Priority.BULK)
    leads = []
    for _ in range(1500):
        driver.serve()
        leads.append(driver.served.get(A, 0) - driver.served.get(B, 0))
    assert max(leads) <= LEAD[Priority.SYSTEM] + WORK
    assert leads[-1] >= LEAD[Priority.SYSTEM] - WORK, "the lead is kept"
    assert driver.served[B] - driver.served[C] <= WORK - LEAD[Priority.BULK]


def test_a_stream_of_new_tenants_does_not_starve_a_waiting_one(driver: QueueDriver) -> None:
    """A new tenant arrives for each one served, and two more wait. A tenant in debt at the lowest priority still advances."""
    driver.put(TenantId("first stranger"), Priority.SYSTEM)
    driver.put(TenantId("second stranger"), Priority.SYSTEM)
    driver.queue.charge(A, 50 * WORK)
    waiter = driver.put(A, Priority.BULK)
    others = 0
    while driver.serve() is not waiter:
        others += WORK
        driver.put(TenantId(f"stranger {others}"), Priority.SYSTEM)
        # Three wait at a time: a third of the service is its own; its debt is 50 WORK, priorities and LAG add LAG each.
        assert others <= 3 * (50 * WORK + 2 * LAG) + 3 * WORK
