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


@pytest.mark.parametrize(
    ("tenants", "order"),
    [
        pytest.param("aabb", [1, 3, 2, 4], id="the least served goes next"),
        pytest.param(["x", "", "long name", "0", "y"], [1, 2, 3, 4, 5], id="names do not matter"),
    ],
)
def test_the_order_of_tenants(driver: QueueDriver, tenants: list[str], order: list[int]) -> None:
    driver.put_all(*map(TenantId, tenants))
    assert driver.order() == order


def test_only_charges_count_and_may_be_corrected(driver: QueueDriver) -> None:
    driver.put_all(A, A, A, B, B)
    assert [driver.pop().arrival for _ in range(2)] == [1, 2], "nothing was charged"
    assert driver.serve().arrival == 3
    driver.put(A)
    assert driver.queue.peek() is not None
    driver.queue.charge(A, -WORK)
    assert driver.tenants(2) == [B, A], "as much as the other one"


def test_backlogged_tenants_get_equal_tokens_for_any_traffic(driver: QueueDriver) -> None:
    """A sends 10 times as many requests of 8 times the size; both always have requests waiting."""
    for second in range(400):
        for _ in range(10):
            driver.put(A, arrived_at=float(second), work=8 * 250)
        driver.put(B, arrived_at=float(second), work=250)
    while driver.queue.tenants.work(A) and driver.queue.tenants.work(B):
        driver.serve()
        assert abs(driver.served[A] - driver.served[B]) <= 8 * 250
    assert driver.served[B] == 400 * 250, "B was backlogged all the time"


def test_weights_divide_the_service() -> None:
    driver = QueueDriver({A: 3.0})
    driver.put_all(*[A, B] * 900)
    driver.tenants(800)
    assert driver.served[A] / driver.served[B] == pytest.approx(3.0, rel=0.01)


@pytest.mark.parametrize("weight", [0.0, -1.0, float("inf"), float("nan"), 1e-9])
def test_an_invalid_weight_raises(weight: float) -> None:
    with pytest.raises(ValueError, match="weight of tenant 'a'"):
        FairQueue({A: weight})


@pytest.mark.parametrize("runs", [None, B, C])
def test_a_tenant_without_waiting_requests_saves_nothing_up(driver: QueueDriver, runs: TenantId | None) -> None:
    """Not even by running one long generation, which counts as service of only a few tokens, nor if another one does."""
    driver.put(runs or B, work=10)
    driver.serve()
    if runs is not None:
        driver.queue.tenants.started(runs)
    driver.put_all(*[A] * 1000)
    driver.tenants(500)
    driver.put_all(*[B] * 100)
    assert 49 <= driver.tenants(100).count(A) <= 51


def test_returning_does_not_cancel_a_debt(driver: QueueDriver) -> None:
    driver.put_all(*[B] * 20)
    driver.put(A, work=10 * WORK)
    assert driver.tenants(2) == [B, A]
    driver.put(A)
    assert driver.tenants(11).index(A) == 10, "A goes next once B was served more than 10 WORK"


def test_use_of_an_idle_server_is_not_held_against_a_tenant(driver: QueueDriver) -> None:
    for _ in range(1000):
        driver.put(A)
        driver.serve()
    driver.put_all(*[B, A] * 10)
    assert 4 <= driver.tenants(10).count(A) <= 6


def test_a_flood_of_system_requests_gets_a_bounded_lead(driver: QueueDriver) -> None:
    for _ in range(400):
        driver.put(A, Priority.SYSTEM)
        driver.put(B, Priority.DEFAULT)
        driver.put(C, Priority.BULK)
    leads = []
    for _ in range(300):
        driver.serve()
        leads.append(driver.served[A] - driver.served[B])
    assert max(leads) <= LEAD[Priority.SYSTEM] + WORK
    assert leads[-1] >= LEAD[Priority.SYSTEM] - WORK, "the lead is kept"
    assert driver.served[B] - driver.served[C] <= WORK - LEAD[Priority.BULK]


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
