"""The scheduler's rules, one at a time. The races between it and a shard are the state machine's business."""

from __future__ import annotations

import pytest
from scheduler_checks import assert_idle
from scheduler_rig import Rig, a_policy, words

from text_generation_proto.values import FailureCode
from text_generation_router.request import QualityOfService, Request, RequestId, TenantId
from text_generation_router.scheduling.messages import SchedulerOutput


def a_request(prompt: int, new: int, tenant: str = "") -> Request:
    return Request(RequestId(999), words(999, prompt), new, qos=QualityOfService(TenantId(tenant)))


def counter(rig: Rig, tenant: str) -> float:
    account = rig.scheduler.queue.tenants.find(TenantId(tenant))
    return 0.0 if account is None else account.counter


def test_the_same_calls_give_the_same_orders() -> None:
    def play() -> list[tuple[int, SchedulerOutput]]:
        rig = Rig(a_policy(max_batch_prefill_tokens=20), blocks=12, replicas=2)
        for number in range(12):
            rig.submit(words(number % 3, 10 + number), new=20, tenant=str(number % 2))
            rig.turn()
        rig.lose(0)
        rig.until_idle()
        return rig.orders

    assert play() == play()


# ---------------------------------------------------------------------------------------------------------- endings


def test_a_request_that_could_never_run_alone_does_not_fit() -> None:
    rig = Rig(a_policy(), blocks=4)
    assert rig.scheduler.fits(60, 5)
    assert not rig.scheduler.fits(60, 6)
    with pytest.raises(AssertionError):
        rig.submit(60, new=6)


def test_a_waiting_request_that_is_cancelled_leaves_nothing() -> None:
    rig = Rig(a_policy())
    rig.submit(end_by=5.0, queue_by=4.0)
    rig.scheduler.cancel(RequestId(0))
    rig.scheduler.cancel(RequestId(0))
    assert rig.turn() == []
    assert rig.scheduler.stats().cancellations == 1
    assert_idle(rig.scheduler)


def test_one_that_was_placed_and_is_cancelled_is_never_sent() -> None:
    rig = Rig(a_policy())
    rig.submit()
    assert rig.scheduler.dispatch() == [0]
    rig.scheduler.cancel(RequestId(0))
    assert rig.scheduler.schedule(0) is None
    assert_idle(rig.scheduler)


def test_one_that_was_placed_and_is_cancelled_costs_its_tenant_nothing() -> None:
    rig = Rig(a_policy())
    rig.submit(tenant="a")
    rig.submit(tenant="b")
    rig.scheduler.dispatch()
    rig.scheduler.cancel(RequestId(0))
    assert counter(rig, "a") == 0


# -------------------------------------------------------------------------------------------------- replicas that go


def test_what_ran_on_a_lost_replica_goes_on_elsewhere_with_what_it_generated() -> None:
    rig = Rig(a_policy(), replicas=2)
    rig.submit(30, new=40)
    rig.turns(12)
    home, had = rig.home(0), rig.tokens[0]
    assert had > 5
    rig.lose(home)
    rig.until_idle()
    assert rig.home(0) == 1 - home
    assert len(rig.admission(0).generated) == had
    assert rig.tokens[0] == 40
    assert rig.scheduler.stats().moves == 1
    assert_idle(rig.scheduler)


def test_what_was_lost_goes_before_all_that_wait_in_order_of_arrival() -> None:
    rig = Rig(a_policy(max_batch_size=3))
    for _ in range(5):
        rig.submit(new=50)
    rig.turns(3)
    rig.lose(0)
    assert rig.scheduler.waiting == 5
    assert rig.turn() == []
    rig.open(0)
    rig.turn()
    assert rig.admitted()[3:] == [0, 1, 2]


def test_a_request_that_gets_nowhere_on_one_replica_after_another_fails() -> None:
    rig = Rig(a_policy(max_moves=2))
    rig.submit(prompt=300)
    rig.turns(2)
    for _ in range(2):
        rig.lose(0)
        rig.open(0)
        rig.turns(2)
    assert rig.failed == {}
    rig.lose(0)
    assert rig.failed == {0: FailureCode.LOST}
    assert_idle(rig.scheduler)


def test_a_request_that_gets_on_between_its_moves_may_move_often() -> None:
    rig = Rig(a_policy(max_moves=1))
    rig.submit(new=100)
    for _ in range(10):
        rig.turns(2)
        rig.lose(0)
        rig.open(0)
    rig.until_idle()
    assert (rig.finished, rig.tokens[0], rig.scheduler.stats().moves) == ([0], 100, 10)


def test_one_that_was_not_sent_yet_has_not_moved() -> None:
    rig = Rig(a_policy(max_moves=0))
    rig.submit(new=3)
    rig.scheduler.dispatch()
    rig.lose(0)
    rig.open(0)
    rig.until_idle()
    assert rig.finished == [0]
    assert rig.scheduler.stats().moves == 0


def test_who_was_cancelled_on_a_lost_replica_is_gone() -> None:
    rig = Rig(a_policy())
    rig.submit(new=50)
    rig.turns(2)
    rig.scheduler.cancel(RequestId(0))
    rig.lose(0)
    assert_idle(rig.scheduler)


def test_what_no_replica_can_hold_after_one_came_back_smaller_fails() -> None:
    rig = Rig(a_policy(), blocks=20)
    rig.submit(200, new=50)
    rig.submit(20, new=5)
    rig.turns(2)
    rig.lose(0)
    rig.open(0, blocks=10)
    assert rig.failed == {0: FailureCode.LOST}
    rig.until_idle()
    assert rig.finished == [1]
    assert_idle(rig.scheduler)


# --------------------------------------------------------------------------------------------------------- deadlines


def test_the_queue_timeout_counts_in_the_queue_alone() -> None:
    rig = Rig(a_policy(max_batch_size=1))
    runs = rig.submit(new=30, queue_by=0.1)
    waits = rig.submit(new=30, queue_by=0.1)
    rig.turn()
    assert rig.scheduler.next_expiry == 0.1
    rig.now = 0.1
    rig.expire()
    assert rig.failed == {waits: FailureCode.EXPIRED}
    assert rig.scheduler.stats().expirations == 1
    rig.until_idle()
    assert rig.finished == [runs]


def test_the_total_timeout_counts_everywhere_and_gets_no_more_prefill() -> None:
    rig = Rig(a_policy())
    rig.submit(640, new=30, end_by=0.05)
    rig.turn()
    rig.now = 0.06
    rig.expire()
    assert rig.failed == {0: FailureCode.EXPIRED}
    orders = rig.turn()
    assert [(one.prefill, one.release) for one in orders] == [((), (rig.admission(0).slot,))]
    assert_idle(rig.scheduler)


def test_a_lost_request_expires_by_its_total_timeout_only() -> None:
    rig = Rig(a_policy())
    rig.submit(new=30, queue_by=0.5, end_by=2.0)
    rig.turn()
    rig.lose(0)
    rig.now = 1.0
    rig.expire()
    assert rig.failed == {}
    rig.now = 2.0
    rig.expire()
    assert rig.failed == {0: FailureCode.EXPIRED}


def test_deadlines_of_those_that_ended_are_forgotten() -> None:
    rig = Rig(a_policy())
    for _ in range(200):
        rig.submit(new=1, end_by=1e6)
        rig.until_idle()
    assert rig.scheduler.next_expiry is None


def test_a_deadline_at_zero_is_one() -> None:
    rig = Rig(a_policy())
    rig.now = -1.0
    rig.submit(queue_by=0.0)
    assert rig.scheduler.next_expiry == 0.0


# ---------------------------------------------------------------------------------------------------------- overload


def test_more_work_than_may_wait_is_refused() -> None:
    rig = Rig(a_policy(max_queued_tokens=500, max_batch_size=1))
    rig.submit(100, new=100)
    rig.turn()
    assert not rig.scheduler.exceeds_queue_limit(a_request(10_000, 1)), "nothing waits: any one may"
    rig.submit(200, new=100)
    assert not rig.scheduler.exceeds_queue_limit(a_request(100, 100))
    rig.submit(150, new=100)
    assert rig.scheduler.exceeds_queue_limit(a_request(100, 100))


def test_a_tenant_below_its_share_is_not_refused_for_others_work() -> None:
    rig = Rig(a_policy(max_queued_tokens=500, max_batch_size=1))
    rig.submit(100, new=100, tenant="flood")
    rig.turn()
    while not rig.scheduler.exceeds_queue_limit(a_request(50, 20, "flood")):
        rig.submit(50, new=20, tenant="flood")
    assert not rig.scheduler.exceeds_queue_limit(a_request(50, 20, "quiet"))
    while not rig.scheduler.exceeds_queue_limit(a_request(50, 20, "quiet")):
        rig.submit(50, new=20, tenant="quiet")
    assert rig.scheduler.stats().queued_tokens <= 1000


def test_the_wait_is_foreseen_from_the_work_queued_and_the_pace_measured() -> None:
    rig = Rig(a_policy(max_batch_size=4))
    assert rig.scheduler.estimated_wait(TenantId("")) == 0.0, "there is room"
    for _ in range(40):
        rig.submit(20, new=20)
    rig.until_idle()
    for _ in range(200):
        rig.submit(20, new=20)
    rig.turns(200)
    foreseen = rig.scheduler.estimated_wait(TenantId(""))
    assert foreseen is not None
    last, began = rig.submit(20, new=20), rig.now
    while last not in rig.admitted():
        rig.turn()
    assert foreseen == pytest.approx(rig.now - began, rel=0.15)


def test_a_quiet_tenant_waits_less_than_one_that_floods() -> None:
    rig = Rig(a_policy(max_batch_size=4))
    for _ in range(100):
        rig.submit(20, new=20, tenant="flood")
    rig.turns(100)
    flood = rig.scheduler.estimated_wait(TenantId("flood"))
    quiet = rig.scheduler.estimated_wait(TenantId("quiet"))
    assert flood is not None
    assert quiet is not None
    assert quiet < flood / 4


# ---------------------------------------------------------------------------------------------------------- fairness


def test_a_tenant_that_floods_does_not_hold_another_up() -> None:
    rig = Rig(a_policy(max_batch_size=2))
    for _ in range(50):
        rig.submit(20, new=20, tenant="flood")
    rig.turns(5)
    quiet = rig.submit(20, new=20, tenant="quiet")
    rig.turns(60)
    assert quiet in rig.finished
    rig.until_idle()
    assert_idle(rig.scheduler)


def test_with_one_tenant_it_is_first_come_first_served() -> None:
    rig = Rig(a_policy(max_batch_size=3))
    for number in range(20):
        rig.submit(5 + 7 * number % 31, new=1 + 5 * number % 17)
    seen: list[int] = []
    while rig.scheduler.requests:
        # Of those that enter in one step the one with the shortest prompt is named first.
        seen += sorted(admission.request.id for orders in rig.turn() for admission in orders.placements)
    assert seen == list(range(20))


def test_a_tenant_pays_for_what_it_took_not_for_what_was_expected() -> None:
    rig = Rig(a_policy())
    rig.submit(20, new=1000, tenant="a")
    rig.turns(4)
    rig.scheduler.cancel(RequestId(0), satisfied=True)
    taken = rig.tokens[0]
    rig.until_idle()
    assert counter(rig, "a") == pytest.approx(20 + taken, abs=1)
