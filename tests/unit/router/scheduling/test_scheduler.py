"""The scheduler's rules, one at a time. The races between it and a shard are the state machine's business."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from text_generation_router.request import FinishReason, Request, RequestId
from text_generation_router.scheduling.blocks import BlockPool
from text_generation_router.scheduling.policy import Policy
from text_generation_router.scheduling.scheduler import Scheduler
from text_generation_router.scheduling.steps import FailureKind, Orders, Outcome

BLOCK = 16


def a_scheduler(blocks: int = 100, slots: int = 8, budget: int = 64, batch: int = 8, ratio: float = 0.0) -> Scheduler:
    return Scheduler(BlockPool(blocks, BLOCK), slots, Policy(budget, batch, ratio, 3))


def a_request(number: int, prompt: int = 4, new: int = 10) -> Request:
    return Request(RequestId(number), tuple(range(prompt)), new)


def decided(scheduler: Scheduler) -> Orders:
    orders = scheduler.decide()
    assert orders is not None
    return orders


def acknowledge(scheduler: Scheduler, orders: Orders) -> None:
    scheduler.apply(Outcome(orders.number))


def step(scheduler: Scheduler, slots: Sequence[int], applied: int, finished: Sequence[int] = ()) -> None:
    scheduler.apply(Outcome(applied, slots, [], [7] * len(slots), dict.fromkeys(finished, FinishReason.LENGTH)))


def test_waiting_requests_enter_in_order_of_arrival() -> None:
    scheduler = a_scheduler()
    for number in range(3):
        scheduler.submit(a_request(number))
    assert [admission.request.id for admission in decided(scheduler).admit] == [0, 1, 2]


def test_one_set_of_orders_is_on_its_way_at_a_time() -> None:
    scheduler = a_scheduler()
    scheduler.submit(a_request(0))
    orders = decided(scheduler)
    scheduler.submit(a_request(1))
    assert scheduler.decide() is None
    acknowledge(scheduler, orders)
    assert [admission.request.id for admission in decided(scheduler).admit] == [1]


def test_a_long_prompt_is_cut_in_chunks_that_fill_the_budget() -> None:
    scheduler = a_scheduler(budget=64)
    scheduler.submit(a_request(0, prompt=150))
    chunks = []
    for _ in range(3):
        orders = decided(scheduler)
        chunks += orders.prefill
        acknowledge(scheduler, orders)
    assert chunks == [(chunks[0][0], 64), (chunks[0][0], 64), (chunks[0][0], 22)]
    assert scheduler.decide() is None


def test_what_a_last_chunk_leaves_of_the_budget_goes_to_the_next_prompt() -> None:
    scheduler = a_scheduler(budget=64)
    scheduler.submit(a_request(0, prompt=100))
    scheduler.submit(a_request(1, prompt=100))
    acknowledge(scheduler, decided(scheduler))
    assert [tokens for _, tokens in decided(scheduler).prefill] == [36, 28]


def test_no_more_run_than_the_batch_size_allows() -> None:
    scheduler = a_scheduler(batch=2)
    for number in range(3):
        scheduler.submit(a_request(number))
    orders = decided(scheduler)
    assert len(orders.admit) == 2
    step(scheduler, [admission.slot for admission in orders.admit], orders.number, [orders.admit[0].slot])
    assert [admission.request.id for admission in decided(scheduler).admit] == [2]


def test_a_prompt_that_finds_no_blocks_waits_and_holds_back_those_behind_it() -> None:
    scheduler = a_scheduler(blocks=10)
    scheduler.submit(a_request(0, prompt=64, new=60))
    acknowledge(scheduler, decided(scheduler))
    scheduler.submit(a_request(1, prompt=150, new=5))
    scheduler.submit(a_request(2, prompt=1, new=1))
    assert scheduler.decide() is None
    assert scheduler.waiting == 2


def test_the_ratio_holds_newcomers_back_until_the_steps_allowed_have_passed() -> None:
    scheduler = a_scheduler(ratio=1.0)
    for number in range(4):
        scheduler.submit(a_request(number, new=100))
    orders = decided(scheduler)
    slots = [admission.slot for admission in orders.admit]
    step(scheduler, slots, orders.number)
    scheduler.submit(a_request(9))
    assert scheduler.decide() is None
    for _ in range(2):
        step(scheduler, slots, orders.number)
    assert [admission.request.id for admission in decided(scheduler).admit] == [9]


def test_a_cancelled_entry_is_released_in_the_next_orders_and_its_blocks_after_they_were_applied() -> None:
    scheduler = a_scheduler()
    scheduler.submit(a_request(0))
    admitted = decided(scheduler)
    acknowledge(scheduler, admitted)
    scheduler.cancel(RequestId(0))
    release = decided(scheduler)
    assert release.release == (admitted.admit[0].slot,)
    assert scheduler.used_blocks > 0
    acknowledge(scheduler, release)
    assert (scheduler.running, scheduler.used_blocks) == (0, 0)


def test_tokens_that_come_after_a_cancel_are_nobodys() -> None:
    scheduler = a_scheduler()
    scheduler.submit(a_request(0))
    orders = decided(scheduler)
    acknowledge(scheduler, orders)
    scheduler.cancel(RequestId(0))
    slot = orders.admit[0].slot
    assert scheduler.owner(slot) is None
    assert scheduler.apply(Outcome(orders.number, [slot], [], [7])).tokens == []


def test_a_waiting_request_that_is_cancelled_leaves_nothing() -> None:
    scheduler = a_scheduler()
    scheduler.submit(a_request(0))
    scheduler.cancel(RequestId(0))
    scheduler.cancel(RequestId(0))
    assert scheduler.decide() is None
    assert scheduler.requests == ()


def test_a_grown_entry_is_granted_blocks_before_it_runs_out() -> None:
    scheduler = a_scheduler()
    scheduler.submit(a_request(0, prompt=16, new=200))
    orders = decided(scheduler)
    slot, room = orders.admit[0].slot, len(orders.admit[0].blocks) * BLOCK - 16
    granted_after = None
    for count in range(1, room + 1):
        step(scheduler, [slot], orders.number)
        if growth := scheduler.decide():
            granted_after = count
            assert growth.grants[0][0] == slot
            break
    assert granted_after is not None
    assert granted_after < room


def test_when_the_pool_runs_dry_the_newest_is_preempted_and_comes_back_first_with_what_it_generated() -> None:
    scheduler = a_scheduler(blocks=8)
    for number in range(2):
        scheduler.submit(a_request(number, prompt=30, new=60))
    orders = decided(scheduler)
    slots = {admission.slot: admission.request.id for admission in orders.admit}
    assert len(slots) == 2
    for _ in range(60):
        step(scheduler, list(slots), orders.number)
        if (new := scheduler.decide()) is not None:
            orders = new
            if orders.release:
                break
    assert [slots[slot] for slot in orders.release] == [1]
    assert scheduler.preemptions == 1
    acknowledge(scheduler, orders)
    assert scheduler.waiting == 1
    scheduler.cancel(RequestId(0))
    scheduler.submit(a_request(5))
    acknowledge(scheduler, decided(scheduler))
    back = decided(scheduler)
    assert [admission.request.id for admission in back.admit] == [1, 5]
    assert set(back.admit[0].generated) == {7}


def test_a_failed_sequence_ends_alone() -> None:
    scheduler = a_scheduler()
    for number in range(2):
        scheduler.submit(a_request(number))
    orders = decided(scheduler)
    first, second = (admission.slot for admission in orders.admit)
    outcome = Outcome(orders.number, [second], [], [7], {}, {first: (FailureKind.NUMERICS, "NaN")})
    deliveries = scheduler.apply(outcome)
    assert [failed.request_id for failed in deliveries.failed] == [0]
    assert [token[0] for token in deliveries.tokens] == [1]
    assert scheduler.running == 1


def test_a_step_may_bring_several_tokens_a_slot() -> None:
    scheduler = a_scheduler()
    for number in range(2):
        scheduler.submit(a_request(number))
    orders = decided(scheduler)
    slots = [admission.slot for admission in orders.admit]
    deliveries = scheduler.apply(
        Outcome(orders.number, slots, [3, 1], [1, 2, 3, 4], {slots[0]: FinishReason.EOS_TOKEN})
    )
    assert deliveries.tokens == [(0, 0, 3, FinishReason.EOS_TOKEN), (1, 3, 4, None)]


def test_a_request_that_could_never_run_alone_does_not_fit() -> None:
    scheduler = a_scheduler(blocks=4)
    assert scheduler.fits(60, 5)
    assert not scheduler.fits(60, 6)
    with pytest.raises(AssertionError):
        scheduler.submit(a_request(0, prompt=60, new=6))


def test_the_same_calls_give_the_same_orders() -> None:
    def play() -> list[Orders | None]:
        scheduler = a_scheduler(blocks=12, budget=20)
        orders = []
        for number in range(6):
            scheduler.submit(a_request(number, prompt=10 + number))
            orders.append(scheduler.decide())
            if orders[-1] is not None:
                acknowledge(scheduler, orders[-1])
        return orders

    assert play() == play()
