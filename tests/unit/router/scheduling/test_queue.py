"""The rules of the queue, one at a time. Order against a simple model: tests/property."""

from __future__ import annotations

import gc

import pytest
from queue_driver import WORK, A, B, C, QueueDriver

from text_generation_router.request import Priority, TenantId
from text_generation_router.scheduling.fairness import LAG, MAX_IDLE
from text_generation_router.scheduling.queue import AGEING_S, LEAD
from text_generation_router.scheduling.sequence import ScheduledSequence

SYSTEM, INTERACTIVE, DEFAULT, BULK = Priority
MINUTE = 2 * AGEING_S


@pytest.fixture
def driver() -> QueueDriver:
    return QueueDriver()


# ------------------------------------------------------------------------------------------------------- one tenant


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


def test_bulk_is_never_starved_by_a_flood_of_its_own_tenant(driver: QueueDriver) -> None:
    """System requests arrive as fast as they are served: the bulk request waits for 90 s of them."""
    bulk = driver.put(priority=BULK)
    for second in range(1000):
        driver.put(priority=SYSTEM, arrived_at=float(second))
        if driver.serve() is bulk:
            break
    assert second == 3 * AGEING_S


# --------------------------------------------------------------------------------- requeued, removed, skipped sequences


def test_requeued_sequences_go_first_in_order_of_arrival(driver: QueueDriver) -> None:
    early, late = driver.put(B, BULK), driver.put(C, BULK)
    assert {driver.pop(), driver.pop()} == {early, late}
    driver.put(A, SYSTEM)
    driver.charge(B, 10**9)
    for _ in range(3):
        driver.queue.requeue(late)
        driver.queue.requeue(early)
        assert [driver.pop(), driver.pop()] == [early, late]


def test_a_removed_sequence_is_gone(driver: QueueDriver) -> None:
    first, second, third = driver.put_all(A, B, A)
    driver.queue.remove(first)
    assert list(driver.queue) == [second, third]
    assert driver.order() == [2, 3]
    with pytest.raises(AssertionError):
        driver.queue.remove(first)


def test_unskipped_sequences_get_their_positions_back(driver: QueueDriver) -> None:
    *_, requeued = driver.put_all(A, A, B, B, C)
    driver.queue.remove(requeued)
    driver.queue.requeue(requeued)
    skipped = [driver.skip() for _ in range(3)]
    assert [sequence.arrival for sequence in skipped] == [5, 1, 2]
    assert (len(driver.queue), driver.queue.work) == (5, 5 * WORK)
    assert driver.serve().arrival == 3
    driver.queue.unskip(skipped)
    assert driver.order() == [5, 1, 2, 4]


def test_a_skipped_sequence_stays_queued(driver: QueueDriver) -> None:
    """The tenant stays active, and the sequence may be removed."""
    driver.put_all(*[B] * 50)
    removed, stays = driver.put_all(A, A)
    driver.serve()
    skipped = [driver.skip() for _ in range(2)]
    assert skipped == [removed, stays]
    driver.tenants(20)
    driver.queue.remove(removed)
    driver.queue.unskip(skipped)
    driver.put(A)
    assert driver.tenants(3) == [A, A, B]


# ---------------------------------------------------------------------------------------------------- figures, memory


def test_work_is_counted_in_total_and_by_tenant(driver: QueueDriver) -> None:
    queue = driver.queue
    driver.put(A, work=5)
    gone = driver.put(B, work=7)
    assert (queue.work, *map(queue.tenants.work, (A, B, C))) == (12, 5, 7, 0)
    queue.remove(gone)
    assert (queue.work, queue.tenants.work(B)) == (5, 0)


def test_shares_are_of_the_active_tenants() -> None:
    driver = QueueDriver({A: 3.0})
    tenants = driver.queue.tenants
    assert tenants.share(A) == tenants.share(B) == 1.0
    sequence = driver.put(A)
    assert (tenants.share(A), tenants.share(B)) == (1.0, 0.25)
    tenants.started(A)
    driver.queue.remove(sequence)
    assert (tenants.share(A), tenants.share(B)) == (1.0, 0.25)
    tenants.ended(A)
    assert tenants.share(B) == 1.0


def test_idle_tenants_without_debt_are_forgotten(driver: QueueDriver) -> None:
    driver.put_all(*(TenantId(str(number)) for number in range(100)))
    driver.order()
    driver.put(A)
    for _ in range(5):
        driver.put(B, work=3 * WORK)
    driver.order()
    driver.put(A)
    driver.order()
    assert len(driver.queue.tenants) <= 2


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
