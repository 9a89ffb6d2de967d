"""Who gets what of the queue's service, and what it comes to over a long time."""

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


def test_two_backlogged_tenants_get_equal_tokens_whatever_they_send(driver: QueueDriver) -> None:
    """A sends 10 times as many requests, and they are 8 times as large; both always have something waiting."""
    for second in range(400):
        for _ in range(10):
            driver.put(A, arrived_at=float(second), work=8 * 250)
        driver.put(B, arrived_at=float(second), work=250)
    while driver.queue.tenants.work(A) and driver.queue.tenants.work(B):
        driver.serve()
        if sum(driver.served.values()) > 20_000:
            assert jain([driver.served[A], driver.served[B]]) >= 0.99
    assert driver.served[B] == 400 * 250, "the backlogged time was all of B's"


def test_weights_divide_the_service() -> None:
    driver = QueueDriver({A: 3.0})
    for _ in range(900):
        driver.put(A)
        driver.put(B)
    for _ in range(800):
        driver.serve()
    assert driver.served[A] / driver.served[B] == pytest.approx(3.0, rel=0.01)


@pytest.mark.parametrize("weight", [0.0, -1.0, float("inf"), float("nan"), 1e-9])
def test_a_weight_that_makes_no_sense_is_refused(weight: float) -> None:
    with pytest.raises(ValueError, match="weight of tenant 'a'"):
        FairQueue({A: weight})


@pytest.mark.parametrize("runs", [False, True])
def test_who_has_nothing_waiting_saves_nothing_up(driver: QueueDriver, runs: bool) -> None:
    """Not even by running one text for a long time, which would count as service of only a few tokens."""
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


def test_one_tenant_that_only_runs_does_not_hold_the_entrance_down(driver: QueueDriver) -> None:
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


def test_coming_back_does_not_pay_a_debt(driver: QueueDriver) -> None:
    for _ in range(20):
        driver.put(B)
    driver.put(A, work=10 * WORK)
    assert [driver.serve().arrival for _ in range(2)] == [1, 21]
    driver.put(A)
    order = [driver.serve().request.qos.tenant for _ in range(11)]
    assert order.index(A) == 10, "A is let in once B has had more than its 10 WORK"


def test_use_of_an_idle_server_is_held_against_nobody(driver: QueueDriver) -> None:
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
    assert leads[-1] >= LEAD[Priority.SYSTEM] - WORK, "the lead is bought, and kept"
    assert driver.served[B] - driver.served[C] <= WORK - LEAD[Priority.BULK]


def test_ever_new_tenants_do_not_keep_a_waiting_one_out(driver: QueueDriver) -> None:
    """One comes for each that is served, and two more wait. Who waits in debt and in the lowest class gets on all the same."""
    driver.put(TenantId("first stranger"), Priority.SYSTEM)
    driver.put(TenantId("second stranger"), Priority.SYSTEM)
    driver.queue.charge(A, 50 * WORK)
    waiter = driver.put(A, Priority.BULK)
    others = 0
    while driver.serve() is not waiter:
        others += WORK
        driver.put(TenantId(f"stranger {others}"), Priority.SYSTEM)
        # Three wait at a time: a third of the service is its own; it owes 50 WORK, and classes and LAG are worth LAG each.
        assert others <= 3 * (50 * WORK + 2 * LAG) + 3 * WORK
