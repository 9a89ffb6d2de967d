"""The rules of the queue, one at a time. Order against a simple model: tests/property."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
from queue_driver import WORK, A, B, C, QueueDriver

from text_generation_router.request import Priority, TenantId
from text_generation_router.scheduling.fairness import LAG, MAX_IDLE
from text_generation_router.scheduling.queue import AGEING_S, LEAD
from text_generation_router.scheduling.sequence import ScheduledSequence


@pytest.fixture
def driver() -> QueueDriver:
    return QueueDriver()


# ------------------------------------------------------------------------------------------------------- one tenant


def test_one_priority_is_first_come_first_served(driver: QueueDriver) -> None:
    for second in range(5):
        driver.put(arrived_at=float(second))
    assert driver.order() == [1, 2, 3, 4, 5]


def test_an_empty_queue_has_no_next_sequence(driver: QueueDriver) -> None:
    assert driver.queue.peek() is None


def test_priorities_order_requests_of_the_same_age(driver: QueueDriver) -> None:
    for priority in reversed(Priority):
        driver.put(priority=priority)
    assert driver.order() == [4, 3, 2, 1]


def test_a_bulk_request_goes_before_interactive_ones_of_a_minute_later(driver: QueueDriver) -> None:
    bulk = driver.put(priority=Priority.BULK, arrived_at=0.0)
    just_before = driver.put(priority=Priority.INTERACTIVE, arrived_at=2 * AGEING_S - 0.1)
    just_after = driver.put(priority=Priority.INTERACTIVE, arrived_at=2 * AGEING_S + 0.1)
    assert driver.order() == [just_before.arrival, bulk.arrival, just_after.arrival]


def test_first_token_by_moves_a_request_forward_but_never_back(driver: QueueDriver) -> None:
    patient = driver.put(arrived_at=0.0, first_token_by=1e6)
    plain = driver.put(arrived_at=0.1)
    hurried = driver.put(arrived_at=5.0, first_token_by=7.0)
    assert driver.order() == [hurried.arrival, patient.arrival, plain.arrival]


def test_a_past_first_token_by_does_not_overtake_older_requests(driver: QueueDriver) -> None:
    waited = driver.put(priority=Priority.SYSTEM, arrived_at=9.0)
    past = driver.put(arrived_at=10.0, first_token_by=-1e9)
    assert driver.order() == [waited.arrival, past.arrival]


def test_bulk_is_never_starved_by_a_flood_of_its_own_tenant(driver: QueueDriver) -> None:
    """System requests arrive as fast as they are served: the bulk request waits for 90 s of them."""
    bulk = driver.put(priority=Priority.BULK, arrived_at=0.0)
    for second in range(1000):
        driver.put(priority=Priority.SYSTEM, arrived_at=float(second))
        if driver.serve() is bulk:
            break
    assert second == 3 * AGEING_S


# --------------------------------------------------------------------------------------------------------- sent back


def test_requeued_sequences_go_first_in_order_of_arrival(driver: QueueDriver) -> None:
    early, late = driver.put(B, Priority.BULK), driver.put(C, Priority.BULK)
    assert {driver.pop(), driver.pop()} == {early, late}
    driver.put(A, Priority.SYSTEM)
    driver.queue.charge(B, 10**9)
    driver.queue.requeue(late)
    driver.queue.requeue(early)
    assert driver.order() == [early.arrival, late.arrival, 3]


def test_a_requeued_sequence_keeps_end_by_but_not_queue_by(driver: QueueDriver) -> None:
    sequence = driver.put(queue_by=5.0, end_by=9.0)
    driver.pop()
    driver.queue.requeue(sequence)
    assert driver.queue.next_expiry == 9.0
    assert driver.queue.expire(8.9) == []
    assert driver.queue.expire(9.0) == [sequence]


def test_an_entry_may_be_requeued_again_and_again(driver: QueueDriver) -> None:
    sequence, *others = (driver.put(end_by=9.0) for _ in range(5))
    for _ in range(5):
        assert driver.pop() is sequence
        driver.queue.requeue(sequence)
    assert driver.queue.expire(9.0) == [sequence, *others]


# ------------------------------------------------------------------------------------------------- expiry, cancelling


def test_no_expired_sequence_is_served_after_expire(driver: QueueDriver) -> None:
    for number in range(300):
        tenant = (A, B, C)[number % 3]
        driver.put(tenant, Priority(number % 4), queue_by=float(number % 50), end_by=float(number % 70) + 5)
    now, given = 0.0, 0
    while driver.queue.peek() is not None:
        expired = driver.queue.expire(now)
        assert all(_expiry(sequence) <= now for sequence in expired)
        assert expired == sorted(expired, key=lambda sequence: (_expiry(sequence), sequence.arrival))
        given += len(expired)
        if driver.queue.peek() is not None:
            assert _expiry(driver.serve()) > now
            given += 1
        now += 0.3
    assert given == 300


def _expiry(sequence: ScheduledSequence) -> float:
    qos = sequence.request.qos
    assert qos.queue_by is not None
    assert qos.end_by is not None
    return min(qos.queue_by, qos.end_by)


def test_next_expiry_follows_the_queue(driver: QueueDriver) -> None:
    assert driver.queue.next_expiry is None
    driver.put()
    assert driver.queue.next_expiry is None
    late, early = driver.put(end_by=9.0), driver.put(queue_by=4.0)
    assert driver.queue.next_expiry == 4.0
    driver.queue.remove(early)
    assert driver.queue.next_expiry == 9.0
    assert driver.queue.expire(9.0) == [late]
    assert driver.queue.next_expiry is None


def test_a_removed_sequence_is_gone(driver: QueueDriver) -> None:
    first, second, third = driver.put(), driver.put(B), driver.put()
    driver.queue.remove(first)
    assert list(driver.queue) == [second, third]
    assert driver.order() == [2, 3]
    with pytest.raises(AssertionError):
        driver.queue.remove(first)


# ----------------------------------------------------------------------------------------------------------- set aside


def test_unskipped_sequences_get_their_positions_back(driver: QueueDriver) -> None:
    for tenant in (A, A, B, B):
        driver.put(tenant)
    requeued = driver.put(C)
    driver.queue.remove(requeued)
    driver.queue.requeue(requeued)
    skipped = [driver.skip() for _ in range(3)]
    assert [sequence.arrival for sequence in skipped] == [5, 1, 2]
    assert len(driver.queue) == 5
    assert driver.queue.work == 5 * WORK
    assert driver.serve().arrival == 3
    driver.queue.unskip(skipped)
    assert driver.order() == [5, 1, 2, 4]


def test_a_skipped_sequence_stays_queued(driver: QueueDriver) -> None:
    """The tenant stays active, and the sequence may be cancelled or expire."""
    for _ in range(50):
        driver.put(B)
    cancelled, expired = driver.put(A), driver.put(A, end_by=1.0)
    stays = driver.put(A)
    driver.serve()
    skipped = [driver.skip() for _ in range(3)]
    assert skipped == [cancelled, expired, stays]
    for _ in range(20):
        driver.serve()
    driver.queue.remove(cancelled)
    assert driver.queue.expire(1.0) == [expired]
    driver.queue.unskip(skipped)
    driver.put(A)
    assert [driver.serve().request.qos.tenant for _ in range(3)] == [A, A, B]


# ------------------------------------------------------------------------------------------------------------- figures


def test_work_is_counted_in_total_and_by_tenant(driver: QueueDriver) -> None:
    driver.put(A, work=5)
    gone = driver.put(B, work=7)
    assert (
        driver.queue.work,
        driver.queue.tenants.work(A),
        driver.queue.tenants.work(B),
        driver.queue.tenants.work(C),
    ) == (12, 5, 7, 0)
    driver.queue.remove(gone)
    assert (driver.queue.work, driver.queue.tenants.work(B)) == (5, 0)


def test_shares_are_of_the_active_tenants() -> None:
    driver = QueueDriver({A: 3.0})
    assert driver.queue.tenants.share(A) == driver.queue.tenants.share(B) == 1.0
    sequence = driver.put(A)
    assert (driver.queue.tenants.share(A), driver.queue.tenants.share(B)) == (1.0, 0.25)
    driver.queue.tenants.started(A)
    driver.queue.remove(sequence)
    assert (driver.queue.tenants.share(A), driver.queue.tenants.share(B)) == (1.0, 0.25)
    driver.queue.tenants.ended(A)
    assert driver.queue.tenants.share(B) == 1.0


# -------------------------------------------------------------------------------------------------------------- memory


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
    assert len(driver.queue.tenants) <= 2


def test_the_debts_of_idle_tenants_are_bounded(driver: QueueDriver) -> None:
    driver.put(A)
    for number in range(MAX_IDLE + 100):
        driver.queue.charge(TenantId(str(number)), 10 * WORK)
    assert len(driver.queue.tenants) == MAX_IDLE + 1


def test_a_correction_for_a_forgotten_tenant_creates_no_account(driver: QueueDriver) -> None:
    driver.queue.charge(B, -5)
    assert len(driver.queue.tenants) == 0


def sequences_in_memory() -> int:
    gc.collect()
    return sum(isinstance(each, ScheduledSequence) for each in gc.get_objects())


def test_removed_sequences_keep_no_memory(driver: QueueDriver) -> None:
    before = sequences_in_memory()
    kept = driver.put()
    for number in range(1000):
        tenant, priority = (A, B)[number % 2], Priority(number % 4)
        driver.queue.remove(driver.put(tenant, priority, arrived_at=float(number), end_by=1e6 + number))
    assert sequences_in_memory() - before <= 5
    assert list(driver.queue) == [kept]


@pytest.mark.parametrize(
    "finish", [QueueDriver.order, lambda driver: driver.queue.expire(1e9)], ids=["served", "expired"]
)
def test_an_empty_queue_holds_nothing(driver: QueueDriver, finish: Callable[[QueueDriver], object]) -> None:
    before = sequences_in_memory()
    for number in range(200):
        driver.put(TenantId(str(number % 7)), Priority(number % 4), end_by=float(number))
    finish(driver)
    assert len(driver.queue) == driver.queue.work == 0
    assert sequences_in_memory() == before


def test_lag_is_the_largest_lead_of_priorities() -> None:
    assert max(LEAD.values()) - min(LEAD.values()) == LAG
