"""Prompts with common prefixes: reuse, and waiting for a prefix that is being computed."""

from __future__ import annotations

from array import array
from dataclasses import replace
from itertools import pairwise

import pytest
from scheduler_checks import assert_idle
from scheduler_rig import BLOCK, Rig, a_policy, words

from text_generation_proto.cache_groups import CacheGroup
from text_generation_proto.values import FailureCode
from text_generation_router.request import ImageFile, PlacedImage, Request, RequestId
from text_generation_router.scheduling.chunking import MIN_SHARED_TOKENS
from text_generation_router.scheduling.messages import ReplicaSpec, StepOutput
from text_generation_router.scheduling.sequence import ScheduledSequence


def a_rig(**changes: object) -> Rig:
    return Rig(a_policy(max_batch_prefill_tokens=1000, **changes))


def test_a_cached_prefix_is_shared() -> None:
    rig = a_rig()
    first = rig.serve(words(1, 100), new=1)
    second = rig.serve(words(1, 70) + words(2, 30), new=1)
    assert rig.cached(first) == 0
    assert rig.cached(second) == 64
    assert rig.placement(second).blocks[:4] == rig.placement(first).blocks[:4]
    assert set(rig.placement(second).blocks[4:]).isdisjoint(rig.placement(first).blocks[:6])
    assert sum(tokens for _, tokens in rig.orders[-1][1].prefill) == 36
    assert (rig.scheduler.stats().prompt_tokens, rig.scheduler.stats().hit_tokens) == (200, 64)


def test_an_image_is_a_hit_where_the_same_one_was_before_and_another_is_none() -> None:
    red, blue = (ImageFile(digest, b"") for digest in (b"1", b"2"))
    asked = Request(RequestId(1), array("I", words(1, 80)), 1, media=(PlacedImage(20, 40, red),))
    keys = [
        ScheduledSequence(request, 0, 0.0, 1).prompt_key
        for request in (
            asked,
            replace(asked, prompt=array("I", [*words(1, 20), *[9] * 40, *words(1, 80)[60:]])),  # an image has any ids
            replace(asked, media=(PlacedImage(20, 40, blue),)),
            replace(asked, media=(PlacedImage(21, 40, red),)),
        )
    ]
    shared = [
        next((at for at in range(80) if a[4 * at : 4 * at + 4] != b[4 * at : 4 * at + 4]), 80)
        for a, b in pairwise(keys)
    ]
    assert shared == [80, 20, 20]
    image = array("I", keys[0][80:240])
    assert min(image) > 2**31
    assert len(set(image)) == 16
    assert keys[0][:80] + keys[0][240:] == array("I", words(1, 80)[:20] + words(1, 80)[60:]).tobytes()


@pytest.mark.parametrize(("prompt", "cached"), [(1, 0), (16, 0), (17, 16), (64, 48), (65, 64)])
def test_one_token_is_always_left_to_compute(prompt: int, cached: int) -> None:
    rig = a_rig()
    rig.serve(words(1, 80), new=1)
    second = rig.serve(words(1, prompt), new=1)
    assert rig.cached(second) == cached


def test_generated_tokens_hit_in_the_next_turn() -> None:
    rig = a_rig()
    rig.serve(words(1, 20), new=60)
    answer = (7,) * 60
    second = rig.serve(words(1, 20) + answer + words(2, 5), new=1)
    # The KV of the last token of 80 was never computed: four blocks of the 79 are whole.
    assert rig.cached(second) == 64


def test_a_scored_prompt_that_fills_the_pool_ends_though_its_blocks_are_cached_twice() -> None:
    rig = Rig(a_policy(max_batch_prefill_tokens=1000), blocks=20)
    rig.serve(words(1, 120), new=1)
    second = rig.serve(words(1, 120), new=201, prompt_logprobs=True)
    assert rig.tokens[second] == 201
    # It was preempted once and then used the cached blocks; its scores had come with the first token.
    assert [placement.cached_tokens for _, placement in rig.placements(second)] == [0, 208]
    assert_idle(rig.scheduler)


def test_salts_share_nothing() -> None:
    rig = a_rig()
    rig.serve(words(1, 80), new=1, salt="one")
    assert [rig.cached(rig.serve(words(1, 80), new=1, salt=salt)) for salt in ("another", "", "one")] == [0, 0, 64]


def test_without_prefix_caching_nothing_is_kept() -> None:
    rig = a_rig(prefix_caching=False)
    for _ in range(2):
        rig.serve(words(1, 80), new=1)
    assert rig.scheduler.stats().hit_tokens == 0
    assert rig.scheduler.stats().cached_blocks == 0


def test_a_replica_whose_model_keeps_states_reuses_nothing_and_nothing_waits_for_it() -> None:
    rig = a_rig()
    rig.lose(0)
    rig.receive(rig.scheduler.open(0, ReplicaSpec(8, 100, BLOCK, keeps_states=True)))
    together = [rig.submit(words(1, 200), new=1) for _ in range(2)]
    rig.turn()
    assert rig.placed() == together
    rig.until_idle()
    rig.serve(words(1, 200), new=1)
    assert (rig.scheduler.stats().hit_tokens, rig.scheduler.stats().cached_blocks) == (0, 0)


def test_what_a_failed_sequence_or_step_computed_is_not_committed() -> None:
    rig = a_rig()
    rig.submit(words(1, 160), new=50)
    rig.turns(20)
    kept = rig.scheduler.stats().cached_blocks
    rig.apply(0, StepOutput(rig.applied[0], failed={rig.placement(0).slot: (FailureCode.NUMERICS, "NaN")}))
    rig.submit(words(2, 160), new=50)
    orders = rig.order()
    slot = orders.placements[0].slot
    rig.apply(0, StepOutput(orders.number, prefilled=[(slot, 160)], failed={slot: (FailureCode.STEP, "it failed")}))
    assert rig.scheduler.stats().cached_blocks == kept == 10
    assert rig.failed == {0: FailureCode.NUMERICS, 1: FailureCode.STEP}
    assert_idle(rig.scheduler)


def test_a_request_waits_for_the_shared_tokens_not_for_the_whole_prompt() -> None:
    rig = a_rig()
    rig.submit(words(1, 300), new=5)
    orders = rig.order()
    second = rig.submit(words(1, 160) + words(2, 30), new=5)
    for chunk in (144, 16):
        rig.scheduler.dispatch()
        assert tuple(rig.replica()._placed) == ()
        rig.apply(0, StepOutput(orders.number, prefilled=[(orders.placements[0].slot, chunk)]))
    rig.scheduler.dispatch()
    assert tuple(rig.replica()._placed) == (second,)


def test_others_overtake_a_request_that_waits_for_a_prefix() -> None:
    rig = Rig(a_policy())
    rig.submit(words(1, 200), new=5)
    rig.turn()
    waiting = rig.submit(words(1, 160) + words(2, 30), new=5)
    passing = rig.serve(words(3, 10), new=5)
    assert rig.placed() == [0, passing, waiting]
    assert rig.cached(waiting) == 160


def test_a_short_prefix_is_computed_again_rather_than_waited_for() -> None:
    rig = a_rig()
    rig.submit(words(1, MIN_SHARED_TOKENS - 1) + words(2, 200), new=5)
    second = rig.submit(words(1, MIN_SHARED_TOKENS - 1) + words(3, 20), new=5)
    rig.turn()
    assert sorted(rig.placed()) == [0, second]
    rig.until_idle()
    assert_idle(rig.scheduler)


def test_a_request_that_waits_for_a_cancelled_prefix_is_placed() -> None:
    rig = Rig(a_policy())
    first = rig.submit(words(1, 300), new=5)
    rig.turn()
    second = rig.submit(words(1, 300), new=5)
    rig.turn()
    rig.scheduler.cancel(rig.placement(first).request.id)
    rig.until_idle()
    assert rig.tokens[second] == 5
    assert rig.cached(second) > 0


@pytest.mark.parametrize(
    ("blocks", "windows", "prompt", "more"),
    [
        pytest.param(18, (), 140, 100, id="full"),
        pytest.param(40, (CacheGroup(14, 64),), 80, 500, id="window"),
    ],
)
def test_a_placement_that_fails_does_not_change_what_is_evicted_next(
    blocks: int, windows: tuple[CacheGroup, ...], prompt: int, more: int
) -> None:
    rig = Rig(a_policy(growth_tokens=16), blocks=blocks, windows=windows)
    first, second = words(1, 64), words(2, 64)
    rig.serve(first, new=1)
    rig.serve(second, new=1)
    rig.submit(words(3, prompt), new=30)
    rig.turns(4)
    late = rig.submit((*first, *words(4, more)), new=1)
    rig.turns(2)
    rig.scheduler.cancel(RequestId(late))
    assert late not in rig.placed(), "there is no room for it"
    rig.until_idle()
    rig.serve(words(5, 64), new=1)
    assert rig.cached(rig.serve((*second, 0), new=1)) == 64, "the one used last stays"
