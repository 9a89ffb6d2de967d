"""The choice of a replica."""

from __future__ import annotations

from collections import Counter

import pytest
from scheduler_checks import assert_idle
from scheduler_rig import Rig, a_policy, words

from text_generation_proto.values import FailureCode
from text_generation_router.request import RequestId
from text_generation_router.scheduling.policy import Dispatch


def a_rig(replicas: int = 3, budget: int = 2000, **changes: object) -> Rig:
    policy = a_policy(max_batch_prefill_tokens=budget, max_batch_size=512, **changes)
    return Rig(policy, blocks=20_000, slots=512, replicas=replicas)


def test_a_request_follows_its_prefix() -> None:
    rig = a_rig()
    homes = {}
    for start in range(3):
        homes[start] = rig.submit(words(start + 1, 500), new=1)
        rig.until_idle()
    assert len({rig.replica_of(number) for number in homes.values()}) == 3
    for turn, start in enumerate((2, 0, 1, 1)):
        again = rig.serve(words(start + 1, 480) + words(10 + turn, 20), new=1)
        assert rig.replica_of(again) == rig.replica_of(homes[start])
        assert rig.cached(again) == 480


def test_of_requests_that_begin_alike_and_come_at_once_each_replica_computes_one() -> None:
    rig = a_rig()
    same = [rig.submit(words(1, 500) + words(10 + number, 5), new=1) for number in range(12)]
    rig.until_idle()
    cached = [(rig.replica_of(number), rig.cached(number)) for number in same]
    assert sum(tokens == 496 for _, tokens in cached) >= 9
    assert len([home for home, tokens in cached if tokens == 0]) == len({home for home, tokens in cached if not tokens})


def test_a_busy_replica_loses_requests_to_others_though_it_has_their_prefix() -> None:
    rig = a_rig(replicas=2)
    first = rig.serve(words(1, 200), new=1)
    same = [rig.submit(words(1, 200) + words(10 + number, 60), new=400) for number in range(10)]
    rig.turn()
    rig.turn()
    rig.turn()
    homes = Counter(rig.replica_of(number) for number in same)
    assert homes[rig.replica_of(first)] >= 1
    assert homes[1 - rig.replica_of(first)] >= 1


def test_a_miss_goes_to_the_least_loaded() -> None:
    rig = a_rig()
    rig.submit(100, new=300)
    rig.submit(300, new=300)
    rig.turn()
    free = ({0, 1, 2} - {rig.replica_of(0), rig.replica_of(1)}).pop()
    third = rig.submit(50, new=1)
    rig.turn()
    assert rig.replica_of(third) == free


@pytest.mark.parametrize("replicas", [4, 16])
def test_a_thousand_misses_spread_evenly(replicas: int) -> None:
    rig = a_rig(replicas=replicas, budget=100_000)
    for _ in range(1000):
        rig.submit(20, new=10)
    rig.turn()
    homes = Counter(rig.replica_of(number) for number in range(1000))
    assert len(homes) == replicas
    # Exact up to sixteen replicas; of more only a sample is compared.
    assert max(homes.values()) - min(homes.values()) <= 1


def test_round_robin_takes_turns() -> None:
    rig = a_rig(dispatch=Dispatch.ROUND_ROBIN)
    same = [rig.submit(words(1, 100), new=1)]
    rig.until_idle()
    for _ in range(5):
        same.append(rig.submit(words(1, 100), new=1))
        rig.until_idle()
    homes = [rig.replica_of(number) for number in same]
    assert homes[:3] == homes[3:]
    assert len(set(homes)) == 3


def test_least_loaded_ignores_prefixes() -> None:
    rig = a_rig(dispatch=Dispatch.LEAST_LOADED, replicas=2)
    rig.submit(words(1, 100), new=300)
    rig.turn()
    second = rig.serve(words(1, 100), new=1)
    assert rig.replica_of(second) != rig.replica_of(0)


def test_random_is_spread_and_the_same_every_time() -> None:
    def homes() -> list[int]:
        rig = a_rig(dispatch=Dispatch.RANDOM)
        for _ in range(300):
            rig.submit(5, new=1)
        rig.turn()
        return [rig.replica_of(number) for number in range(300)]

    counts = Counter(homes())
    assert homes() == homes()
    assert min(counts.values()) > 70


def test_with_many_replicas_a_prefix_is_found_again() -> None:
    rig = a_rig(replicas=64)
    for start in range(20):
        rig.submit(words(start + 1, 300), new=1)
    rig.until_idle()
    for start in range(20):
        again = rig.serve(words(start + 1, 300) + words(99, 5), new=1)
        assert rig.replica_of(again) == rig.replica_of(start)
        assert rig.cached(again) == 288


def test_a_large_request_goes_to_the_replica_that_can_hold_it() -> None:
    rig = Rig(a_policy(max_batch_prefill_tokens=2000), blocks=8, replicas=2)
    rig.lose(1)
    rig.open(1, blocks=40)
    large = [rig.submit(60, new=200) for _ in range(3)]
    rig.until_idle()
    assert {rig.replica_of(number) for number in large} == {1}
    assert rig.finished == large


@pytest.mark.parametrize("drains", [True, False])
def test_a_request_for_a_draining_or_lost_replica_delays_no_others_and_can_be_cancelled(drains: bool) -> None:
    rig = Rig(a_policy(max_batch_prefill_tokens=2000), blocks=8, replicas=2)
    rig.lose(1)
    rig.open(1, blocks=40)
    rig.scheduler.drain(1) if drains else rig.lose(1)
    large, cancelled = rig.submit(60, new=200), rig.submit(60, new=200)
    small = rig.submit(10, new=5)
    rig.turns(10)
    assert rig.finished == [small]
    rig.scheduler.cancel(RequestId(cancelled))
    rig.scheduler.drain(1, draining=False) if drains else rig.open(1, blocks=40)
    rig.until_idle()
    assert rig.finished == [small, large]
    assert_idle(rig.scheduler)


def test_the_only_replica_with_room_is_found_among_many() -> None:
    rig = Rig(a_policy(max_batch_prefill_tokens=2000), blocks=8, replicas=24)
    for _ in range(23):
        rig.submit(100, new=2)  # each fills one replica
    rig.turn()
    assert len({rig.replica_of(number) for number in range(23)}) == 23
    last = rig.submit(100, new=2)
    rig.turn()
    assert rig.placed()[-1] == last


def test_replicas_that_lack_an_adapter_get_none_of_its_requests_and_hold_up_no_others() -> None:
    rig = a_rig(replicas=3)
    rig.slots, rig.adapters = 2, ("sql",)
    rig.open_again(1)
    long = [rig.submit(40, new=60, adapter="sql") for _ in range(30)]
    others = [rig.submit(40, new=20) for _ in range(40)]
    rig.turns(300)
    assert set(others) <= set(rig.finished), "the replicas without the adapter serve those behind"
    rig.until_idle()
    assert {rig.replica_of(number) for number in long} == {1}
    assert rig.finished.index(long[0]) < rig.finished.index(long[-1])


def test_requests_of_an_adapter_wait_for_its_replica_and_fail_once_it_has_gone() -> None:
    rig = a_rig(replicas=2)
    rig.adapters = ("sql",)
    rig.open_again(0)
    running, moved = rig.submit(40, new=300, adapter="sql"), rig.submit(40, new=100)
    rig.turns(5)
    rig.lose(0)
    rig.turns(200)
    assert not rig.failed
    rig.receive(rig.scheduler.remove(0))
    assert (rig.failed, rig.finished) == ({running: FailureCode.LOST}, [moved])
    assert not rig.scheduler.capacity.fits(40, 300, "sql")
    assert_idle(rig.scheduler)


def test_an_adapter_without_a_place_gets_that_of_the_one_that_had_it_longest() -> None:
    rig = a_rig()
    rig.adapters, rig.max_loras = ("a", "b", "c"), 2
    rig.open_again(0)

    def running() -> list[int]:
        return [number for number in range(rig.submitted) if rig.tokens.get(number) and number not in rig.finished]

    first, second = rig.submit(new=30, adapter="a"), rig.submit(new=60, adapter="b")
    rig.turns(2)
    waiting = rig.submit(new=10, adapter="c")
    rig.turns(2)
    later = [rig.submit(new=5, adapter="a"), rig.submit(new=5, adapter="b"), rig.submit(new=5)]
    rig.turns(3)
    assert running() == [first, second, *later[1:]], "only the place of a is emptied, and the model alone needs none"
    rig.until_idle()
    assert rig.finished.index(first) < rig.finished.index(waiting) < rig.finished.index(later[0])

    # One that waits no more leaves the others alone.
    first, second = rig.submit(new=40, adapter="a"), rig.submit(new=10, adapter="b")
    rig.turns(2)
    waiting = rig.submit(new=90, adapter="c")
    rig.turns(12)
    assert waiting in running(), "it has the place of b, which ended"
    again = rig.submit(new=5, adapter="a")
    rig.turns(3)
    assert again in running(), "a is not to make way any more"
    rig.until_idle()
    assert_idle(rig.scheduler)


def test_requests_of_an_adapter_that_comes_run_and_share_nothing_with_another_of_its_name() -> None:
    rig = a_rig()
    rig.open_again(0)
    rig.scheduler.set_adapter("a", (0,))
    prompt = words(1, 40)
    hits = [rig.cached(rig.serve(prompt, adapter="a")) for _ in range(2)]
    rig.scheduler.set_adapter("a", ())
    assert not rig.scheduler.capacity.fits(40, 10, "a")
    rig.scheduler.set_adapter("a", (0,))
    hits.append(rig.cached(rig.serve(prompt, adapter="a")))
    assert [bool(each) for each in hits] == [False, True, False]
