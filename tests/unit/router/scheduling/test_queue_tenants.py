"""Who gets what of the queue's service, and what it comes to over a long time."""

from __future__ import annotations

import pytest
from queue_desk import WORK, A, B, C, Desk

from text_generation_router.request import Priority, TenantId
from text_generation_router.scheduling.queue import LEAD, FairQueue
from text_generation_router.scheduling.tenants import LAG


@pytest.fixture
def desk() -> Desk:
    return Desk()


def jain(values: list[float]) -> float:
    return sum(values) ** 2 / (len(values) * sum(value * value for value in values))


def test_the_least_served_tenant_goes_next(desk: Desk) -> None:
    for _ in range(2):
        desk.put(A)
    for _ in range(2):
        desk.put(B)
    assert desk.order() == [1, 3, 2, 4]


def test_pop_charges_nothing(desk: Desk) -> None:
    for tenant in (A, A, A, B):
        desk.put(tenant)
    assert [desk.queue.pop().arrival for _ in range(4)] == [1, 2, 3, 4]


def test_a_correction_brings_a_tenant_forward_again(desk: Desk) -> None:
    for tenant in (A, A, B, B):
        desk.put(tenant)
    assert desk.serve().arrival == 1
    assert desk.queue.peek() is not None
    desk.queue.charge(A, -WORK)
    assert desk.serve().arrival == 2


def test_the_order_of_tenants_does_not_depend_on_their_names(desk: Desk) -> None:
    for name in ("x", "", "long name", "0", "y"):
        desk.put(TenantId(name))
    assert desk.order() == [1, 2, 3, 4, 5]


def test_two_backlogged_tenants_get_equal_tokens_whatever_they_send(desk: Desk) -> None:
    """A sends 10 times as many requests, and they are 8 times as large; both always have something waiting."""
    for second in range(400):
        for _ in range(10):
            desk.put(A, arrived=float(second), work=8 * 250)
        desk.put(B, arrived=float(second), work=250)
    while desk.queue.work(A) and desk.queue.work(B):
        desk.serve()
        if sum(desk.served.values()) > 20_000:
            assert jain([desk.served[A], desk.served[B]]) >= 0.99
    assert desk.served[B] == 400 * 250, "the backlogged time was all of B's"


def test_weights_divide_the_service() -> None:
    desk = Desk({A: 3.0})
    for _ in range(900):
        desk.put(A)
        desk.put(B)
    for _ in range(800):
        desk.serve()
    assert desk.served[A] / desk.served[B] == pytest.approx(3.0, rel=0.01)


@pytest.mark.parametrize("weight", [0.0, -1.0, float("inf"), float("nan"), 1e-9])
def test_a_weight_that_makes_no_sense_is_refused(weight: float) -> None:
    with pytest.raises(ValueError, match="weight of tenant 'a'"):
        FairQueue({A: weight})


@pytest.mark.parametrize("runs", [False, True])
def test_who_has_nothing_waiting_saves_nothing_up(desk: Desk, runs: bool) -> None:
    """Not even by running one text for a long time, which would count as service of only a few tokens."""
    desk.put(B, work=10)
    desk.serve()
    if runs:
        desk.queue.started(B)
    for _ in range(1000):
        desk.put(A)
    for _ in range(500):
        desk.serve()
    for _ in range(100):
        desk.put(B)
    before = dict(desk.served)
    for _ in range(100):
        desk.serve()
    assert abs((desk.served[A] - before[A]) - (desk.served[B] - before[B])) <= 2 * WORK


def test_one_tenant_that_only_runs_does_not_hold_the_entrance_down(desk: Desk) -> None:
    desk.put(C, work=10)
    desk.serve()
    desk.queue.started(C)
    for _ in range(1000):
        desk.put(A)
    for _ in range(500):
        desk.serve()
    for _ in range(100):
        desk.put(B)
    order = [desk.serve().request.qos.tenant for _ in range(20)]
    assert 9 <= order.count(A) <= 11


def test_coming_back_does_not_pay_a_debt(desk: Desk) -> None:
    for _ in range(20):
        desk.put(B)
    desk.put(A, work=10 * WORK)
    assert [desk.serve().arrival for _ in range(2)] == [1, 21]
    desk.put(A)
    order = [desk.serve().request.qos.tenant for _ in range(11)]
    assert order.index(A) == 10, "A is let in once B has had more than its 10 WORK"


def test_use_of_an_idle_server_is_held_against_nobody(desk: Desk) -> None:
    for _ in range(1000):
        desk.put(A)
        desk.serve()
    for _ in range(10):
        desk.put(B)
        desk.put(A)
    order = [desk.serve().request.qos.tenant for _ in range(10)]
    assert 4 <= order.count(A) <= 6


def test_a_flood_of_system_requests_gets_a_bounded_lead(desk: Desk) -> None:
    for _ in range(2000):
        desk.put(A, Priority.SYSTEM)
        desk.put(B, Priority.DEFAULT)
        desk.put(C, Priority.BULK)
    leads = []
    for _ in range(1500):
        desk.serve()
        leads.append(desk.served.get(A, 0) - desk.served.get(B, 0))
    assert max(leads) <= LEAD[Priority.SYSTEM] + WORK
    assert leads[-1] >= LEAD[Priority.SYSTEM] - WORK, "the lead is bought, and kept"
    assert desk.served[B] - desk.served[C] <= WORK - LEAD[Priority.BULK]


def test_ever_new_tenants_do_not_keep_a_waiting_one_out(desk: Desk) -> None:
    """One comes for each that is served, and two more wait. Who waits in debt and in the lowest class gets on all the same."""
    desk.put(TenantId("first stranger"), Priority.SYSTEM)
    desk.put(TenantId("second stranger"), Priority.SYSTEM)
    desk.queue.charge(A, 50 * WORK)
    waiter = desk.put(A, Priority.BULK)
    others = 0
    while desk.serve() is not waiter:
        others += WORK
        desk.put(TenantId(f"stranger {others}"), Priority.SYSTEM)
        # Three wait at a time: a third of the service is its own; it owes 50 WORK, and classes and LAG are worth LAG each.
        assert others <= 3 * (50 * WORK + 2 * LAG) + 3 * WORK
