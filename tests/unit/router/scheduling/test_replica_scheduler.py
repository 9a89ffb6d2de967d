"""One replica: chunks, growth, preemption, late reports."""

from __future__ import annotations

import pytest
from scheduler_checks import assert_idle, check_scheduler
from scheduler_rig import BLOCK, Rig, a_policy

from text_generation_proto.values import FinishReason
from text_generation_router.request import Priority, RequestId
from text_generation_router.scheduling.messages import ReplicaSpec, SchedulerOutput, StepOutput


def test_a_long_prompt_is_split_and_the_rest_of_the_budget_goes_to_the_next_one() -> None:
    rig = Rig(a_policy())
    rig.submit(100)
    rig.submit(100)
    chunks = [dict(orders.prefill) for orders in rig.turns(4)]
    assert chunks == [{0: 64}, {0: 36, 1: 28}, {1: 64}, {1: 8}]


def test_a_prompt_without_blocks_waits_and_so_do_later_ones() -> None:
    rig = Rig(a_policy(max_batch_prefill_tokens=1000), blocks=10)
    rig.submit(64, new=60)
    rig.turn()
    rig.submit(150, new=5)
    rig.submit(1, new=1)
    rig.turn()
    assert len(rig.scheduler.queue) == 2
    rig.until_idle()
    assert rig.placed() == [0, 1, 2]


@pytest.mark.parametrize(("blocks", "waiting"), [(30, 0), (40, 1)])
def test_a_placement_leaves_blocks_for_answers(blocks: int, waiting: int) -> None:
    rig = Rig(a_policy(max_batch_prefill_tokens=5000), blocks=160)
    rig.submit(100 * BLOCK, new=100)
    rig.turn()
    rig.submit(blocks * BLOCK, new=100)
    rig.turn()
    assert len(rig.scheduler.queue) == waiting, "six answers of fifty tokens take 19 blocks"
    rig.until_idle()
    assert rig.scheduler.stats().preemptions == 0


def test_the_waiting_served_ratio_counts_for_a_limited_number_of_steps() -> None:
    rig = Rig(a_policy(waiting_served_ratio=1.0, max_waiting_tokens=3))
    for _ in range(4):
        rig.submit(new=100)
    rig.turn()
    late = rig.submit()
    rig.turns(2)
    assert late not in rig.placed()
    rig.turn()
    assert late in rig.placed()


def test_a_growing_sequence_gets_blocks_before_it_runs_out() -> None:
    rig = Rig(a_policy())
    rig.serve(16, new=200)
    # One turn per token and one for the prompt: it never stalled.
    assert rig.now == pytest.approx(200 * rig.step_s)
    assert sum(len(blocks) for orders in rig.orders for _, blocks in orders[1].allocations) > 0


@pytest.mark.parametrize("tokens", [2, 9, 17])
def test_sequences_have_room_for_drafts(tokens: int) -> None:
    rig = Rig(a_policy(), slots=4, tokens_per_step=tokens)
    for _ in range(4):
        rig.submit(16, new=1 + 20 * tokens)
    rig.until_idle()
    # A turn for the prompts, and one for every `tokens` tokens: no draft was cut.
    assert rig.now == pytest.approx(21 * rig.step_s)
    assert sum(rig.tokens.values()) == 4 * (1 + 20 * tokens)


def until_preempted(rig: Rig) -> SchedulerOutput:
    for _ in range(500):
        for orders in rig.turn():
            if orders.release:
                return orders
    raise AssertionError("no request was preempted")


def test_without_blocks_the_newest_is_preempted_and_returns_with_its_tokens() -> None:
    rig = Rig(a_policy(growth_tokens=40), blocks=8)
    rig.submit(30, new=60)
    rig.submit(30, new=60)
    orders = until_preempted(rig)
    assert orders.release == (rig.placement(1).slot,)
    had = rig.tokens[1]
    rig.until_idle()
    assert rig.scheduler.stats().preemptions == 1
    assert len(rig.placement(1).generated) == had
    assert rig.cached(1) > 0
    assert (rig.tokens[0], rig.tokens[1]) == (60, 60)
    assert_idle(rig.scheduler)


def test_a_preempted_request_goes_before_queued_ones() -> None:
    rig = Rig(a_policy(growth_tokens=40), blocks=8)
    rig.submit(30, new=60)
    rig.submit(30, new=60)
    until_preempted(rig)
    rig.submit(4, new=1, priority=Priority.SYSTEM)
    rig.scheduler.cancel(RequestId(0))
    rig.until_idle()
    assert rig.placed()[2:] == [1, 2]


@pytest.mark.parametrize(
    ("blocks", "priorities"),
    [
        pytest.param(15, (Priority.DEFAULT, Priority.BULK, Priority.INTERACTIVE), id="low before new"),
        pytest.param(8, (Priority.BULK, Priority.SYSTEM), id="never the oldest"),
    ],
)
def test_the_victim_is_chosen_by_priority_but_never_the_oldest(blocks: int, priorities: tuple[Priority, ...]) -> None:
    rig = Rig(a_policy(growth_tokens=40), blocks=blocks)
    for priority in priorities:
        rig.submit(30, new=60, priority=priority)
    assert until_preempted(rig).release == (rig.placement(1).slot,)


def test_before_measurements_a_prompt_is_computed_block_by_block() -> None:
    rig = Rig(a_policy(max_batch_prefill_tokens=4000, target_itl_s=0.001), blocks=1000, step_s=0.0)
    rig.submit(3000, new=500)
    assert rig.turn()[0].prefill == ((0, 3000),), "nothing decodes"
    rig.turn()
    rig.submit(100, new=5)
    assert rig.turn()[0].prefill == ((1, BLOCK),)


def test_a_self_scheduling_engine_gets_whole_prompts_and_no_blocks() -> None:
    rig = Rig(a_policy(), self_scheduling=True)
    rig.submit(100, new=200)
    orders = rig.order()
    assert (orders.prefill, orders.allocations) == ((), ())
    assert (orders.placements[0].blocks, orders.placements[0].cached_tokens) == ((), 0)
    slot = orders.placements[0].slot
    for _ in range(150):
        rig.apply(0, StepOutput(orders.number, [slot], [], [7]))
        assert rig.scheduler.schedule(0) is None
        check_scheduler(rig.scheduler)


def test_a_self_scheduling_engine_gets_two_steps_of_prompts_ahead() -> None:
    rig = Rig(a_policy(), self_scheduling=True)
    for _ in range(5):
        rig.submit(50, new=5)
    orders = rig.order()
    assert [placement.request.id for placement in orders.placements] == [0, 1, 2]


def test_a_self_scheduling_engine_may_exceed_the_modelled_blocks() -> None:
    rig = Rig(a_policy(), self_scheduling=True)
    rig.submit(20, new=300)
    orders = rig.order()
    slot = orders.placements[0].slot
    rig.apply(0, StepOutput(orders.number, [slot], [300], [7] * 300, {slot: FinishReason.LENGTH}))
    assert rig.finished == [0]
    assert_idle(rig.scheduler)


def test_a_request_waits_until_its_maximum_length_can_be_reserved() -> None:
    rig = Rig(a_policy(max_batch_prefill_tokens=1000), blocks=10)
    rig.lose(0)
    rig.receive(rig.scheduler.open(0, ReplicaSpec(8, 10, BLOCK, self_scheduling=True, reserves_max_length=True)))
    first, second = rig.submit(10, new=100), rig.submit(10, new=100)
    rig.scheduler.dispatch()
    assert [request for request in (first, second) if RequestId(request) in rig.replica()._placed] == [first]
    assert len(rig.scheduler.queue) == 1
