"""The rules of the queue, one at a time. Order against a naive model: tests/property."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
from queue_desk import WORK, A, B, C, Desk, Waiter

from text_generation_router.request import Priority, TenantId
from text_generation_router.scheduling.queue import AGEING_S, LEAD
from text_generation_router.scheduling.tenants import LAG, MAX_IDLE


@pytest.fixture
def desk() -> Desk:
    return Desk()


# ------------------------------------------------------------------------------------------------------- one tenant


def test_one_class_is_first_come_first_served(desk: Desk) -> None:
    for second in range(5):
        desk.put(arrived=float(second))
    assert desk.order() == [1, 2, 3, 4, 5]


def test_an_empty_queue_has_nobody_to_give(desk: Desk) -> None:
    assert desk.queue.peek() is None
    with pytest.raises(IndexError):
        desk.queue.pop()
    with pytest.raises(IndexError):
        desk.queue.skip()


def test_classes_go_in_order_while_they_came_together(desk: Desk) -> None:
    for priority in reversed(Priority):
        desk.put(priority=priority)
    assert desk.order() == [4, 3, 2, 1]


def test_a_bulk_request_goes_before_interactive_ones_that_came_two_ageings_later(desk: Desk) -> None:
    bulk = desk.put(priority=Priority.BULK, arrived=0.0)
    just_before = desk.put(priority=Priority.INTERACTIVE, arrived=2 * AGEING_S - 0.1)
    just_after = desk.put(priority=Priority.INTERACTIVE, arrived=2 * AGEING_S + 0.1)
    assert desk.order() == [just_before.arrival, bulk.arrival, just_after.arrival]


def test_a_hoped_for_first_token_moves_a_request_forward_and_never_back(desk: Desk) -> None:
    patient = desk.put(arrived=0.0, first_token_by=1e6)
    plain = desk.put(arrived=0.1)
    hurried = desk.put(arrived=5.0, first_token_by=7.0)
    assert desk.order() == [hurried.arrival, patient.arrival, plain.arrival]


def test_a_hope_already_past_does_not_overtake_who_waited(desk: Desk) -> None:
    waited = desk.put(priority=Priority.SYSTEM, arrived=9.0)
    past = desk.put(arrived=10.0, first_token_by=-1e9)
    assert desk.order() == [waited.arrival, past.arrival]


def test_bulk_is_never_starved_by_a_flood_of_its_own_tenant(desk: Desk) -> None:
    """System requests come as fast as they are served, for ever: the bulk one waits for 90 s of them and no more."""
    bulk = desk.put(priority=Priority.BULK, arrived=0.0)
    for second in range(1000):
        desk.put(priority=Priority.SYSTEM, arrived=float(second))
        if desk.serve() is bulk:
            break
    assert second == 3 * AGEING_S


# --------------------------------------------------------------------------------------------------------- sent back


def test_who_was_sent_back_goes_first_of_all_in_order_of_arrival(desk: Desk) -> None:
    early, late = desk.put(B, Priority.BULK), desk.put(C, Priority.BULK)
    assert {desk.queue.pop(), desk.queue.pop()} == {early, late}
    desk.put(A, Priority.SYSTEM)
    desk.queue.charge(B, 10**9)
    desk.queue.put_back(late)
    desk.queue.put_back(early)
    assert desk.order() == [early.arrival, late.arrival, 3]


def test_who_was_sent_back_keeps_its_deadline_but_not_that_of_the_queue(desk: Desk) -> None:
    entry = desk.put(queue_by=5.0, end_by=9.0)
    desk.queue.pop()
    desk.queue.put_back(entry)
    assert desk.queue.next_expiry == 9.0
    assert desk.queue.expire(8.9) == []
    assert desk.queue.expire(9.0) == [entry]


def test_an_entry_may_be_sent_back_again_and_again(desk: Desk) -> None:
    entry, *others = (desk.put(end_by=9.0) for _ in range(5))
    for _ in range(5):
        assert desk.queue.pop() is entry
        desk.queue.put_back(entry)
    assert desk.queue.expire(9.0) == [entry, *others]


# ------------------------------------------------------------------------------------------------- expiry, cancelling


def test_nothing_expired_is_popped_after_expire(desk: Desk) -> None:
    for number in range(300):
        tenant = (A, B, C)[number % 3]
        desk.put(tenant, Priority(number % 4), queue_by=float(number % 50), end_by=float(number % 70) + 5)
    now, given = 0.0, 0
    while desk.queue.peek() is not None:
        expired = desk.queue.expire(now)
        assert all(_expiry(entry) <= now for entry in expired)
        assert expired == sorted(expired, key=lambda entry: (_expiry(entry), entry.arrival))
        given += len(expired)
        if desk.queue.peek() is not None:
            assert _expiry(desk.serve()) > now
            given += 1
        now += 0.3
    assert given == 300


def _expiry(entry: Waiter) -> float:
    service = entry.request.qos
    assert service.queue_by is not None
    assert service.end_by is not None
    return min(service.queue_by, service.end_by)


def test_next_expiry_follows_the_entries(desk: Desk) -> None:
    assert desk.queue.next_expiry is None
    desk.put()
    assert desk.queue.next_expiry is None
    late, early = desk.put(end_by=9.0), desk.put(queue_by=4.0)
    assert desk.queue.next_expiry == 4.0
    desk.queue.remove(early)
    assert desk.queue.next_expiry == 9.0
    assert desk.queue.expire(9.0) == [late]
    assert desk.queue.next_expiry is None


def test_a_cancelled_entry_is_gone(desk: Desk) -> None:
    first, second, third = desk.put(), desk.put(B), desk.put()
    desk.queue.remove(first)
    assert list(desk.queue) == [second, third]
    assert desk.order() == [2, 3]
    with pytest.raises(AssertionError):
        desk.queue.remove(first)


# ----------------------------------------------------------------------------------------------------------- set aside


def test_entries_set_aside_get_their_places_again(desk: Desk) -> None:
    for tenant in (A, A, B, B):
        desk.put(tenant)
    sent_back = desk.put(C)
    desk.queue.remove(sent_back)
    desk.queue.put_back(sent_back)
    skipped = [desk.queue.skip() for _ in range(3)]
    assert [entry.arrival for entry in skipped] == [5, 1, 2]
    assert len(desk.queue) == 5
    assert desk.queue.work() == 5 * WORK
    assert desk.serve().arrival == 3
    desk.queue.unskip(skipped)
    assert desk.order() == [5, 1, 2, 4]


def test_who_is_set_aside_has_not_left(desk: Desk) -> None:
    """Its tenant does not come back from idle, and it may be cancelled or expire meanwhile."""
    for _ in range(50):
        desk.put(B)
    cancelled, expired = desk.put(A), desk.put(A, end_by=1.0)
    stays = desk.put(A)
    desk.serve()
    skipped = [desk.queue.skip() for _ in range(3)]
    assert skipped == [cancelled, expired, stays]
    for _ in range(20):
        desk.serve()
    desk.queue.remove(cancelled)
    assert desk.queue.expire(1.0) == [expired]
    desk.queue.unskip(skipped)
    desk.put(A)
    assert [desk.serve().request.qos.tenant for _ in range(3)] == [A, A, B]


# ------------------------------------------------------------------------------------------------------------- figures


def test_work_is_counted_in_total_and_by_tenant(desk: Desk) -> None:
    desk.put(A, work=5)
    gone = desk.put(B, work=7)
    assert (desk.queue.work(), desk.queue.work(A), desk.queue.work(B), desk.queue.work(C)) == (12, 5, 7, 0)
    desk.queue.remove(gone)
    assert (desk.queue.work(), desk.queue.work(B)) == (5, 0)


def test_shares_are_of_the_active_tenants() -> None:
    desk = Desk({A: 3.0})
    assert desk.queue.share(A) == desk.queue.share(B) == 1.0
    entry = desk.put(A)
    assert (desk.queue.share(A), desk.queue.share(B)) == (1.0, 0.25)
    desk.queue.started(A)
    desk.queue.remove(entry)
    assert (desk.queue.share(A), desk.queue.share(B)) == (1.0, 0.25)
    desk.queue.ended(A)
    assert desk.queue.share(B) == 1.0


# -------------------------------------------------------------------------------------------------------------- memory


def test_idle_tenants_without_debt_are_forgotten(desk: Desk) -> None:
    for number in range(100):
        desk.put(TenantId(str(number)))
    desk.order()
    desk.put(A)
    for _ in range(5):
        desk.put(B, work=3 * WORK)
    desk.order()
    desk.put(A)
    desk.order()
    assert desk.queue.tenants <= 2


def test_the_debts_of_idle_tenants_are_bounded(desk: Desk) -> None:
    desk.put(A)
    for number in range(MAX_IDLE + 100):
        desk.queue.charge(TenantId(str(number)), 10 * WORK)
    assert desk.queue.tenants == MAX_IDLE + 1


def test_late_corrections_of_the_forgotten_make_no_tenants(desk: Desk) -> None:
    desk.queue.charge(B, -5)
    assert desk.queue.tenants == 0


def test_cancelled_entries_keep_no_memory(desk: Desk) -> None:
    kept = desk.put()
    gone = []
    for number in range(1000):
        entry = desk.put((A, B)[number % 2], Priority(number % 4), arrived=float(number), end_by=1e6 + number)
        gone.append(weakref.ref(entry))
        desk.queue.remove(entry)
        del entry
    gc.collect()
    assert sum(ref() is not None for ref in gone) <= 4
    assert list(desk.queue) == [kept]


@pytest.mark.parametrize("finish", [Desk.order, lambda desk: desk.queue.expire(1e9)], ids=["served", "expired"])
def test_an_empty_queue_holds_nothing(desk: Desk, finish: Callable[[Desk], object]) -> None:
    entries = [desk.put(TenantId(str(number % 7)), Priority(number % 4), end_by=float(number)) for number in range(200)]
    references = [weakref.ref(entry) for entry in entries]
    entries.clear()
    finish(desk)
    assert len(desk.queue) == desk.queue.work() == 0
    gc.collect()
    assert not any(ref() for ref in references)


def test_lag_is_all_that_classes_can_buy() -> None:
    assert max(LEAD.values()) - min(LEAD.values()) == LAG
