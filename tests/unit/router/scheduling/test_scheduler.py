"""The rules of the scheduler, one at a time. Races with shards: tests/property/test_scheduler_machine.py."""

from __future__ import annotations

import pytest
from scheduler_checks import assert_idle
from scheduler_rig import Rig, a_policy, words

from text_generation_proto.values import FailureCode, Grammar, GrammarKind
from text_generation_router.request import QualityOfService, Request, RequestId, TenantId


def a_request(prompt: int, new: int, tenant: str = "") -> Request:
    return Request(RequestId(999), words(999, prompt), new, qos=QualityOfService(TenantId(tenant)))


def counter(rig: Rig, tenant: str) -> float:
    return sum(account.counter for account in rig.scheduler.queue.tenants if account.name == tenant)


def test_a_request_that_could_never_run_alone_does_not_fit() -> None:
    rig = Rig(a_policy(), blocks=4)
    assert rig.scheduler.capacity.fits(60, 5)
    assert not rig.scheduler.capacity.fits(60, 6)
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


def test_a_placed_request_that_is_cancelled_is_refunded_and_never_sent() -> None:
    rig = Rig(a_policy())
    rig.submit(tenant="a")
    rig.submit(tenant="b")
    assert rig.scheduler.dispatch() == [0]
    rig.scheduler.cancel(RequestId(0))
    assert counter(rig, "a") == 0
    assert [placement.request.id for placement in rig.order().placements] == [1]


@pytest.mark.parametrize("grammar", [None, Grammar(GrammarKind.REGEX, "a+")])
def test_requests_of_a_lost_replica_continue_elsewhere_with_their_tokens(grammar: Grammar | None) -> None:
    rig = Rig(a_policy(), replicas=2)
    rig.submit(30, new=40, grammar=grammar)
    rig.turns(12)
    home, had = rig.replica_of(0), rig.tokens[0]
    assert had > 5
    rig.lose(home)
    rig.until_idle()
    assert rig.replica_of(0) == 1 - home
    assert len(rig.placement(0).generated) == had
    assert rig.tokens[0] == 40
    assert rig.scheduler.stats().moves == 1
    assert_idle(rig.scheduler)


def test_requests_of_a_lost_replica_go_before_queued_ones() -> None:
    rig = Rig(a_policy(max_batch_size=3))
    for _ in range(5):
        rig.submit(new=50)
    rig.turns(3)
    rig.lose(0)
    assert len(rig.scheduler.queue) == 5
    assert rig.turn() == []
    rig.open(0)
    rig.turn()
    assert rig.placed()[3:] == [0, 1, 2]


def test_a_request_fails_after_losing_replicas_without_a_new_token() -> None:
    rig = Rig(a_policy(max_request_moves=2))
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


def test_a_request_that_ends_its_replicas_fails_alone() -> None:
    rig = Rig(a_policy(max_request_moves=2))
    requests = [rig.submit() for _ in range(6)]
    for _ in range(2):
        assert len(rig.order().placements) == 6
        rig.lose(0)
        rig.open(0)
    [suspect] = rig.order().placements
    later = rig.submit()
    rig.scheduler.dispatch()
    waiting = {sequence.id for sequence in rig.scheduler.queue}
    assert waiting == set(requests) - {suspect.request.id}, "only suspects wait for the suspect"
    rig.lose(0)
    assert list(rig.failed) == [suspect.request.id]
    rig.open(0)
    rig.until_idle()
    assert sorted(rig.finished) == sorted({*requests, later} - {suspect.request.id})
    assert_idle(rig.scheduler)


def test_a_request_with_new_tokens_between_moves_may_move_often() -> None:
    rig = Rig(a_policy(max_request_moves=1))
    rig.submit(new=100)
    for _ in range(10):
        rig.turns(2)
        rig.lose(0)
        rig.open(0)
    rig.until_idle()
    assert (rig.finished, rig.tokens[0], rig.scheduler.stats().moves) == ([0], 100, 10)


def test_a_request_that_was_not_sent_does_not_count_as_moved() -> None:
    rig = Rig(a_policy(max_request_moves=0))
    rig.submit(new=3)
    rig.scheduler.dispatch()
    rig.lose(0)
    rig.open(0)
    rig.until_idle()
    assert rig.finished == [0]
    assert rig.scheduler.stats().moves == 0


def test_a_request_too_large_for_the_returned_replica_fails() -> None:
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


def test_deadlines_are_kept_until_the_request_ends() -> None:
    rig = Rig(a_policy())
    assert rig.scheduler.next_expiry is None
    late, early = rig.submit(new=1, end_by=9.0), rig.submit(new=1, queue_by=0.0)
    assert rig.scheduler.next_expiry == 0.0, "a deadline at zero is one"
    rig.scheduler.cancel(RequestId(early))
    assert rig.scheduler.next_expiry == 9.0
    rig.until_idle()
    assert (rig.finished, rig.scheduler.next_expiry) == ([late], None)


def test_more_work_than_may_wait_is_refused() -> None:
    rig = Rig(a_policy(max_queued_tokens=500, max_batch_size=1))
    rig.submit(100, new=100)
    rig.turn()
    assert not rig.scheduler.exceeds_queue_limit(a_request(10_000, 1)), "an empty queue accepts any request"
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


def test_the_wait_for_a_permit_is_that_for_the_end_of_a_running_sequence() -> None:
    rig = Rig(a_policy(max_batch_size=4))
    for _ in range(2):
        rig.submit(20, new=200)
    rig.turns(20)
    assert rig.scheduler.estimated_wait(TenantId("")) == 0.0, "there is room"
    estimated = rig.scheduler.estimated_wait(TenantId(""), for_permit=True)
    assert estimated is not None
    assert 0.1 < estimated < 1.0, "of each, 80 tokens are still expected"


def test_the_estimated_wait_is_queued_work_over_throughput() -> None:
    rig = Rig(a_policy(max_batch_size=4))
    assert rig.scheduler.estimated_wait(TenantId("")) == 0.0, "there is room"
    for _ in range(40):
        rig.submit(20, new=20)
    rig.until_idle()
    for _ in range(200):
        rig.submit(20, new=20)
    rig.turns(200)
    estimated = rig.scheduler.estimated_wait(TenantId(""))
    assert estimated is not None
    last, began = rig.submit(20, new=20), rig.now
    while last not in rig.placed():
        rig.turn()
    assert estimated == pytest.approx(rig.now - began, rel=0.15)


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
    rig.submit(20, new=20, tenant="quiet")
    queue = rig.scheduler.queue
    own = rig.scheduler.estimated_wait(TenantId("quiet"))
    flood = rig.scheduler.estimated_wait(TenantId("flood"))
    assert flood is not None
    assert own == pytest.approx(flood * queue.tenants.work(TenantId("quiet")) / 0.5 / queue.work), "at half of the rate"


def test_a_tenant_pays_for_generated_not_expected_tokens() -> None:
    rig = Rig(a_policy())
    rig.submit(20, new=1000, tenant="a")
    rig.turns(4)
    rig.scheduler.cancel(RequestId(0), satisfied=True)
    taken = rig.tokens[0]
    rig.until_idle()
    assert counter(rig, "a") == pytest.approx(20 + taken, abs=1)
